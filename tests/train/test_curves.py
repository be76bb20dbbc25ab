"""The picture of a run shows its numbers, and only those that it has."""

import math
import struct
import sys
import warnings

import pytest

from p3o_train.sinks import JsonlSink

pytest.importorskip("matplotlib")
from matplotlib.colors import to_rgba

from p3o_train.curves import DPI, PANELS, _figure, draw_curves

LABELS = [panel.label for panel in PANELS]
STEPS = 5


def row(step, method="p3o"):
    return {
        "step": step,
        "train/reward_mean": 0.1 * step,
        f"train/{method}/normalized_ess": 0.9 - 0.1 * step,
        f"train/{method}/log_ratio_abs_mean": 0.01 * step,
        f"train/{method}/score_loss": -0.5 * step,
        f"train/{method}/adaptive_kl_loss": 0.25 * step,
        f"train/{method}/total_loss": -0.25 * step,
        "train/grad_norm": 1.0 + step,
        "train/time/rollout_s": 3.0 + step,
        "train/time/prepass_s": 1.0,
        "train/time/train_s": 2.0,
        "train/learning_rate": 1e-6,
    }


def rows(method="p3o", without=()):
    made = [row(step, method) for step in range(STEPS)]
    return [{name: value for name, value in one.items() if not name.startswith(tuple(without))} for one in made]


def panels(made):
    return {axes.get_ylabel(): axes for axes in _figure(made).axes}


def column(made, name):
    return [one[name] for one in made]


def lines(axes):
    """label -> (steps, values)."""
    return {line.get_label(): (list(line.get_xdata()), list(line.get_ydata())) for line in axes.lines}


def bands(axes):
    """label -> (bottom, top, edges) of a stacked part."""
    parts = {patch.get_label(): patch.get_data() for patch in axes.patches}
    return {label: (list(part.baseline), list(part.values), list(part.edges)) for label, part in parts.items()}


@pytest.mark.parametrize("method", ["p3o", "grpo"])
def test_every_number_is_in_its_panel(method):
    made = rows(method)
    drawn, steps = panels(made), list(range(STEPS))
    assert list(drawn) == LABELS
    expected = {
        "mean reward": {"reward": "reward_mean"},
        "normalized ESS": {"ESS": f"{method}/normalized_ess"},
        "mean |log ratio| of a token": {"log ratio": f"{method}/log_ratio_abs_mean"},
        "loss per token": {
            "score": f"{method}/score_loss",
            "total": f"{method}/total_loss",
            "adaptive KL": f"{method}/adaptive_kl_loss",
        },
        "gradient norm": {"gradient norm": "grad_norm"},
    }
    for label, curves in expected.items():
        wanted = {curve: (steps, column(made, f"train/{name}")) for curve, name in curves.items()}
        assert lines(drawn[label]) == wanted, label


def test_times_are_stacked():
    rollout = [3.0 + step for step in range(STEPS)]
    edges = [-0.5, 0.5, 1.5, 2.5, 3.5, 4.5]
    assert bands(panels(rows())["seconds of a step"]) == {
        "rollout": ([0.0] * STEPS, rollout, edges),
        "pre-pass": (rollout, [time + 1 for time in rollout], edges),
        "training": ([time + 1 for time in rollout], [time + 3 for time in rollout], edges),
    }


def test_bands_reach_half_way_to_steps_that_are_far_apart():
    made = [{"step": step, "train/time/train_s": 1.0} for step in (10, 20, 40)]
    assert bands(panels(made)["seconds of a step"])["training"][2] == [5, 15, 30, 50]


def test_a_step_without_a_pre_pass_took_no_time_for_it():
    made = rows()
    del made[2]["train/time/prepass_s"]
    bottom, top, _ = bands(panels(made)["seconds of a step"])["pre-pass"]
    assert [high - low for low, high in zip(bottom, top, strict=True)] == [1, 1, 0, 1, 1]


@pytest.mark.parametrize(
    ("without", "missing"),
    [
        (["train/reward"], ["mean reward"]),
        (["train/p3o/"], ["normalized ESS", "mean |log ratio| of a token", "loss per token"]),
        (["train/time/", "train/grad"], ["gradient norm", "seconds of a step"]),
        (["train/p3o/", "train/time/", "train/grad"], [label for label in LABELS if label != "mean reward"]),
    ],
)
def test_panels_without_numbers_are_left_out(without, missing):
    assert list(panels(rows(without=without))) == [label for label in LABELS if label not in missing]


def test_curves_without_numbers_are_left_out():
    drawn = panels(rows(without=["train/p3o/total", "train/time/prepass"]))
    assert list(lines(drawn["loss per token"])) == ["score", "adaptive KL"]
    assert list(bands(drawn["seconds of a step"])) == ["rollout", "training"]


def test_only_null_is_no_number():
    made = [one | {"train/grad_norm": math.nan} for one in rows()]
    assert "gradient norm" not in panels(made)


def test_null_leaves_a_gap():
    made = rows()
    made[2]["train/grad_norm"] = math.nan
    line = panels(made)["gradient norm"].lines[0]
    assert list(line.get_xdata()) == [0, 1, 2, 3, 4]
    assert [math.isnan(value) for value in line.get_ydata()] == [False, False, True, False, False]
    assert line.get_marker() == "."  # also a point between two gaps is seen


def test_a_number_that_only_some_steps_have_is_drawn_at_those():
    made = rows()
    del made[0]["train/reward_mean"], made[3]["train/reward_mean"]
    assert lines(panels(made)["mean reward"])["reward"][0] == [1, 2, 4]


@pytest.mark.parametrize(("method", "color", "noted"), [("p3o", "tab:blue", True), ("grpo", "tab:orange", False)])
def test_the_method_has_its_colour_and_the_note_on_the_cap_is_that_of_p3o(method, color, noted):
    figure = _figure(rows(method))
    drawn = {axes.get_ylabel(): axes for axes in figure.axes}
    assert figure.get_suptitle() == f"{method.upper()}, steps 0 to 4"
    assert bool(drawn["normalized ESS"].get_title()) is noted
    single = ("mean reward", "normalized ESS", "mean |log ratio| of a token", "gradient norm")
    assert {to_rgba(drawn[label].lines[0].get_color()) for label in single} == {to_rgba(color)}
    for label in ("loss per token", "seconds of a step"):
        assert len({handle.get_label() for handle in drawn[label].get_legend_handles_labels()[0]}) == 3


def test_axes_start_where_the_quantity_does_and_show_all_data():
    for label, axes in panels(rows()).items():
        low, high = axes.get_ylim()
        drawn = [value for line in axes.lines for value in line.get_ydata()]
        drawn += [value for _, top, _ in bands(axes).values() for value in top]
        assert low <= min(drawn) and max(drawn) < high, label
        if label in ("mean reward", "loss per token"):
            continue
        # matplotlib leaves 5% of what is shown below the top, here with the bottom at 0
        assert low == 0 and (label == "normalized ESS" or high == pytest.approx(1.05 * max(drawn))), label
    assert panels(rows())["normalized ESS"].get_ylim() == (0, 1.02)


def tick_labels(axis):
    """Those in view; others exist and are not drawn."""
    low, high = axis.get_view_interval()
    return [tick.label1 for tick in axis.get_major_ticks() if low <= tick.get_loc() <= high]


def text_boxes(figure):
    """Of everything that is written, as it is drawn."""
    renderer = figure.canvas.get_renderer()
    texts = [figure._suptitle]
    for axes in figure.axes:
        texts += [axes.title, axes.xaxis.label, axes.yaxis.label]
        texts += [label for axis in (axes.xaxis, axes.yaxis) for label in tick_labels(axis)]
        texts += axes.get_legend().get_texts() if axes.get_legend() else []
    seen = [text for text in texts if text.get_text() and text.get_visible()]
    return [(text.get_text(), text.get_window_extent(renderer)) for text in seen]


@pytest.mark.parametrize("scale", [1, 5000])
@pytest.mark.parametrize("without", [[], ["train/grad"], ["train/grad", "train/time"], ["train/p3o", "train/time"]])
def test_no_text_covers_another_or_leaves_the_picture(without, scale):
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    made = [one | {"step": scale * one["step"], "train/reward_mean": -123.5 * scale} for one in rows(without=without)]
    figure = _figure(made)
    figure.set_dpi(DPI)
    FigureCanvasAgg(figure).draw()
    legends = [(axes.get_legend().get_window_extent(), axes.bbox) for axes in figure.axes if axes.get_legend()]
    # the frame of a legend, which is not drawn, touches the panel
    assert all(legend.y0 > panel.y1 - 5 for legend, panel in legends)
    boxes = [box for box in text_boxes(figure) if box[1].width]
    width, height = figure.get_size_inches() * DPI
    for index, (text, box) in enumerate(boxes):
        assert box.x0 >= 0 and box.y0 >= 0 and box.x1 <= width and box.y1 <= height, text
        for other, other_box in boxes[index + 1 :]:
            assert not box.overlaps(other_box), (text, other)


@pytest.fixture
def jsonl(tmp_path):
    path = tmp_path / "metrics.jsonl"
    sink = JsonlSink(path)
    for one in rows():
        sink.write(one["step"], {name: value for name, value in one.items() if name != "step"})
    sink.close()
    return path


def test_the_picture_of_six_panels_is_1560_by_936(jsonl, tmp_path):
    picture = tmp_path / "curves.png"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        draw_curves(jsonl, picture)
    content = picture.read_bytes()
    assert content.startswith(b"\x89PNG") and len(content) > 20_000  # an empty picture of this size has 5 kB
    assert struct.unpack(">II", content[16:24]) == (1560, 936)


def test_the_same_file_gives_the_same_picture_in_any_style_and_opens_no_figure(jsonl, tmp_path):
    from matplotlib import pyplot

    first, second = tmp_path / "first.png", tmp_path / "second.png"
    draw_curves(jsonl, first)
    with pyplot.style.context("dark_background"):
        draw_curves(jsonl, second)
        assert pyplot.rcParams["axes.facecolor"] == "black"  # the caller's style is as it was
    assert first.read_bytes() == second.read_bytes()
    assert pyplot.get_fignums() == []


def test_one_step_alone_is_drawn():
    drawn = panels([row(7)])
    assert drawn["mean reward"].lines[0].get_marker() == "."
    assert bands(drawn["seconds of a step"])["rollout"] == ([0.0], [10.0], [6.5, 7.5])
    in_view = [[place for place in axes.get_xticks() if 6.5 <= place <= 7.5] for axes in drawn.values()]
    assert in_view == [[7.0]] * len(drawn)
    assert {axes.get_xlim() for axes in drawn.values()} == {(6.5, 7.5)}


def test_a_long_run_has_no_markers():
    assert panels([row(step) for step in range(100)])["mean reward"].lines[0].get_marker() == "None"


@pytest.mark.parametrize("content", ["", '{"step": 0, "loss": 1.0}\n'])
def test_a_file_without_numbers_to_draw_is_refused(tmp_path, content):
    path = tmp_path / "metrics.jsonl"
    path.write_text(content)
    with pytest.raises(ValueError, match=r"metrics\.jsonl: \d steps and none .*train/reward_mean"):
        draw_curves(path, tmp_path / "curves.png")
    assert not (tmp_path / "curves.png").exists()


def test_matplotlib_is_needed_to_draw_only(jsonl, tmp_path, monkeypatch):
    for name in ("matplotlib", "matplotlib.style"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ImportError, match="pip install matplotlib"):
        draw_curves(jsonl, tmp_path / "curves.png")
