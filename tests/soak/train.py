"""``p3o train`` with a short deadline for a server's answers, which is no flag: the default is half an hour."""

import functools
import os
import sys

from p3o_train import cli, engines

if __name__ == "__main__":
    deadline = float(os.environ["P3O_SOAK_DEADLINE_S"])
    engines.SGLangEngine = functools.partial(engines.SGLangEngine, timeout_s=deadline)  # type: ignore[misc, assignment]
    sys.exit(cli.main())
