"""The partition table at the end of the report, where it was measured in this process."""

from typing import Any

from tests.megatron.partition_table import MEASURED


def pytest_terminal_summary(terminalreporter: Any, config: Any) -> None:
    text = config.stash.get(MEASURED, None)
    if text is not None:
        terminalreporter.section("one step, cut in every way: relative errors")
        terminalreporter.write_line(text)
