"""Import numba, and refuse configurations that would compile kernels for another CPU than `cpu_target.isa` names.

Nothing imports numba before the first kernel runs: the import takes 0.3 s.
"""

from __future__ import annotations

import os
from typing import Any

from quantkit.errors import QuantkitError


def load_numba() -> Any:
    """The module numba. QuantkitError where its configuration names another CPU than the environment does."""
    refuse_numba_config()
    import numba

    environment, configured = os.environ.get("NUMBA_CPU_NAME") or None, numba.config.CPU_NAME or None
    if environment != configured:
        raise QuantkitError(
            f"numba is configured for the CPU {configured}, NUMBA_CPU_NAME says {environment or 'nothing'}; remove "
            "cpu_name from .numba_config.yaml, or set the variable to it"
        )
    return numba


def refuse_numba_config() -> None:
    """QuantkitError where numba would read its settings from a file of the working directory.

    Whoever supplies a directory of models could then choose how kernels are compiled, and which modules are loaded.
    """
    if os.path.isfile(".numba_config.yaml"):
        raise QuantkitError(
            f"{os.path.abspath('.numba_config.yaml')} changes numba's settings for what is started in this directory; "
            "remove it or work in another directory. Environment variables (NUMBA_…) can set the same"
        )
