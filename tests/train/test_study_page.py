"""Tables and page of the study: numbers by hand, sentences that follow them, the same bytes from the same tables."""

import json
import statistics

import pytest

from p3o_train.study import claims
from p3o_train.study.cells import result_path
from p3o_train.study.claims import Score
from p3o_train.study.command import run_study
from p3o_train.study.design import Cell
from p3o_train.study.page import about, page, read_tables, write_page, write_tables
from p3o_train.study.results import CellRow, cell_row, curve_points, read_results


def result(setting, method, seed, rewards, ess=1.0, kl=0.0, diverged="", planned=None):
    rows = [[reward, ess, 0.25, kl] for reward in rewards]
    return {
        "cell": [setting, method, seed],
        "rows": rows,
        "evaluations": rewards[::4],
        "planned": planned or len(rows),
        "diverged": diverged,
        "seconds": 2.0,
    }


def test_row_of_a_cell():
    rewards = [0.0] * 5 + [0.8] * 10 + [0.5] * 5
    made = result("on_policy", "p3o", 42, rewards)
    made["rows"][3][1:] = [0.5, 0.75, 8.0]
    made["rows"][-1][1] = 0.6
    row = cell_row(made)
    assert row == CellRow(
        setting="on_policy",
        method="p3o",
        seed=42,
        evaluation=pytest.approx((0.8 + 0.8 + 0.5) / 3),  # of 0.0, 0.0, 0.8, 0.8, 0.5
        final_reward=pytest.approx(0.65),
        best_reward=pytest.approx(0.8),
        least_ess=0.5,
        late_ess=pytest.approx((5 + 0.6) / 6),
        mean_kl=pytest.approx(0.4),
        mean_limited=pytest.approx((19 * 0.25 + 0.75) / 20),
        diverged=0,
        seconds=2.0,
        steps=20,
    )


def test_rows_of_diverged_cells():
    assert cell_row(result("on_policy", "pg", 1, [0.25, 0.75], diverged="invalid data")).evaluation == 0.25
    at_once = cell_row(result("on_policy", "pg", 1, [], diverged="invalid data", planned=4))
    assert (at_once.evaluation, at_once.final_reward, at_once.steps, at_once.diverged) == (0.0, 0.0, 0, 1)


def test_curves_are_means_over_seeds_of_means_over_steps():
    long, short = [0.0, 1.0] * 64, [0.5] * 68
    points = curve_points(
        [
            result("on_policy", "p3o", 1, long, ess=0.5),
            result("on_policy", "p3o", 2, short, ess=0.7, planned=128, diverged="invalid data"),
            result("on_policy", "pg", 1, [1.0] * 128),
        ]
    )
    mine = [point for point in points if point.method == "p3o"]
    assert [point.step for point in mine] == list(range(4, 129, 4))  # 32 points
    assert [point.seeds for point in mine] == [2] * 17 + [1] * 15
    assert all(point.reward == 0.5 and point.reward_spread == 0 for point in mine)
    assert mine[0].ess == pytest.approx(0.6)
    assert mine[0].ess_spread == pytest.approx(statistics.stdev([0.5, 0.7]))
    assert (mine[-1].ess, mine[-1].ess_spread) == (0.5, 0.0)
    assert len(points) == 64


# claims


def score(mean, spread=0.01, diverged=0):
    return Score(mean, spread, 3, diverged)


def test_against_clips():
    row = {"p3o": score(0.90), "grpo_0p2": score(0.5), "grpo_0p4": score(0.925, 0.02), "grpo_0p6": score(0.7)}
    text = claims.against_clips(row)
    assert "P3O ends at 0.900 ± 0.010, within 0.03 of the best GRPO clip (0.4, 0.925 ± 0.020)" in text
    assert "not separated from it (difference -0.025, spreads 0.010 and 0.020)" in text
    below = claims.against_clips(row | {"p3o": score(0.85)})
    assert "NOT within 0.03" in below and "below it by 0.075, more than both spreads together" in below
    above = claims.against_clips(row | {"p3o": score(0.99)})
    assert "NOT" not in above and "above it by 0.065" in above
    rows = {"one": row, "two": row | {"p3o": score(0.85)}, "three": {"p3o": score(0.3)}}
    assert claims.count_close(rows) == (1, 2)


def test_failures():
    row = {"p3o": score(0.9), "cispo": score(0.721), "pg": score(0.719), "grpo_0p2": score(0.88, diverged=1)}
    assert claims.failures(row) == {
        "pg": "0.719 ± 0.010, 80% of the best",
        "grpo_0p2": "0.880 ± 0.010, diverged in 1 of 3 seeds",
    }


def test_variants_and_scopes():
    row = {"p3o": score(0.2, 0.05), "p3o_importance": score(0.25, 0.05), "p3o_kl_off": score(0.9)}
    default, importance, off = claims.variants(row)
    assert default == "proxy_safe: 0.200 ± 0.050."
    assert "not separated" in importance
    assert "above it by 0.700" in off
    ((setting, text),) = claims.scopes({"lag_16": row | {"p3o_micro_batch": score(0.1)}, "on_policy": row})
    assert setting == "lag_16"
    assert text.startswith("step scope 0.200 ± 0.050; micro-batch scope 0.100 ± 0.010, below it by 0.100")


def test_fresh_ess():
    rows = [cell_row(result("on_policy", "p3o", seed, [1.0] * 20, ess=0.99995)) for seed in (1, 2)]
    assert claims.fresh_ess(rows).startswith("On fresh data e is 1: the least of all steps and seeds is 0.999950")
    rows.append(cell_row(result("on_policy", "p3o", 3, [1.0] * 20, ess=0.98)))
    assert "NOT 1 throughout" in claims.fresh_ess(rows) and "0.980000" in claims.fresh_ess(rows)
    assert claims.fresh_ess(rows[:0]) == "On-policy P3O was not run."


def test_drift():
    made = [result("lag_16", "p3o", seed, [1.0] * 30, ess=ess, kl=ess) for seed, ess in ((1, 0.5), (2, 0.7))]
    rows = [cell_row(one) for one in [*made, result("lag_16", "pg", 1, [1.0] * 30, ess=0.1)]]
    assert claims.drift(rows) == "P3O's e is 0.600 in the last third of the steps, 0.500 at least, and its KL 0.6 nats."
    assert claims.drift(rows[2:]) == "P3O was not run."


# the page

METHODS = {"p3o": 0.9, "grpo_0p2": 0.6, "pg": 0.3}


@pytest.fixture
def output(tmp_path):
    cells = [Cell("on_policy", method, seed) for seed in (1, 2) for method in METHODS]
    cells += [Cell("t0p6_mismatch", "p3o", 1), Cell("t0p6_mismatch", "p3o_kl_off", 1)]
    made = [result(*cell, [METHODS.get(cell.method, 0.4) + 0.02 * (cell.seed - 1)] * 40) for cell in cells]
    write_tables(tmp_path, made, about("short", cells, 2))
    write_page(tmp_path)
    return tmp_path


def test_page(output):
    text = (output / "study.md").read_text()
    row = "[on-policy](#on-policy) | 0.910 ± 0.014 |  | 0.610 ± 0.014 | 0.310 ± 0.014 |"
    assert f"| {row}" in text
    assert "in 0 of 1 settings" not in text
    assert "within 0.03 of the best of the GRPO clips 0.2, 0.4 and 0.6 in 1 of 1 settings" in text
    assert "PG fails in 1 of 1 settings: on-policy (0.310 ± 0.014, 34% of the best)." in text
    assert "On fresh data e is 1: the least of all steps and seeds is 1.000000." in text
    assert "temperature 0.6, mismatch: proxy_safe: 0.900 ± 0.000. no KL: 0.400 ± 0.000, below it by 0.500" in text
    assert "`--rollout-temperature 0.6 --temperature-convention mismatch`" in text
    assert "--advantage-estimator grpo --clip-low 0.2 --clip-high 0.2" in text
    assert "2 cells at a time" in text
    for setting in ("on_policy", "t0p6_mismatch"):
        assert f"(images/study_{setting}.png)" in text
        assert (output / "images" / f"study_{setting}.png").read_bytes().startswith(b"\x89PNG")


def test_the_same_bytes_from_the_tables(output, tmp_path, capsys):
    before = {path: path.read_bytes() for path in output.rglob("*") if path.is_file()}
    for path in before:
        if path.suffix != ".csv":
            path.unlink()
    assert run_study(arguments(page_from=output)) == 0
    assert {path: path.read_bytes() for path in before} == before
    assert page(read_tables(output)).encode() == before[output / "study.md"]


def test_another_number_gives_another_page(output):
    path = output / "data" / "study.csv"
    path.write_text(path.read_text().replace("on_policy,p3o,1,0.9,", "on_policy,p3o,1,0.1,"))
    text = page(read_tables(output))
    assert "| 0.510 ± 0.580 |" in text
    assert (
        "P3O ends at 0.510 ± 0.580, NOT within 0.03 of the best GRPO clip (0.2, 0.610 ± 0.014): not separated" in text
    )
    assert "0.4 and 0.6 in 0 of 1 settings" in text


def test_tables_of_another_kind(output, capsys):
    path = output / "data" / "study.csv"
    path.write_text(path.read_text().replace("evaluation", "reward", 1))
    before = (output / "study.md").read_bytes()
    assert run_study(arguments(page_from=output)) == 2
    assert "study.csv must have the columns setting, method, seed, evaluation" in capsys.readouterr().err
    assert (output / "study.md").read_bytes() == before


def test_cells_that_have_not_run(tmp_path):
    asked = [Cell("on_policy", "p3o", 1), Cell("on_policy", "p3o", 2)]
    path = result_path(tmp_path, asked[0])
    path.parent.mkdir()
    path.write_text(json.dumps(result(*asked[0], [1.0])))
    with pytest.raises(ValueError, match=r"1 of 2 cells have no result in .*, such as on_policy-p3o-2"):
        read_results(tmp_path, asked)
    assert read_results(tmp_path, asked[:1])[0]["cell"] == ["on_policy", "p3o", 1]


def arguments(**given):
    from p3o_train.cli import parse

    args = parse(["study"])
    for name, value in given.items():
        setattr(args, name, value)
    return args


def test_wrong_flags(tmp_path, capsys):
    for given, said in (
        ({"workers": 0}, "--workers must be at least 1; got 0"),
        ({"settings": ["lag"]}, "--settings must be some of"),
    ):
        assert run_study(arguments(run_dir=tmp_path / "new", **given)) == 2
        assert said in capsys.readouterr().err
        assert not (tmp_path / "new").exists()
