"""``check-model``: that models like a given one convert, proven on a tiny random one."""

from functools import partial

from slime_convert.check.models import check_model, check_models
from slime_convert.check.results import CheckResult, Proof
from slime_convert.former_names import former

__all__ = ["CheckResult", "Proof", "check_model", "check_models"]

__getattr__ = partial(former, __name__)
