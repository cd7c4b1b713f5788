"""Runs a server's module with the API key of the environment: `python -P with_key.py MODULE [FLAG …]`.

A key among the flags could be read by everybody who lists processes. Servers write their settings to their logs, too;
there the key is replaced. Runs in the engines' interpreter, and so imports nothing of slime.
"""

import os
import sys

KEY = "SLIME_API_KEY"
HIDDEN = "[removed]"
# Module → module that it imports for a flag that slime refuses: sglang-router's balancer in Python, with its web
# framework and, where it is installed, all of SGLang.
UNUSED = {"sglang_router.launch_router": "sglang_router.mini_lb"}


def main() -> None:
    """Run the module that is the first argument as ``python -m`` would."""
    import logging
    import runpy
    import types

    key = os.environ.pop(KEY)  # processes that the server starts do without it
    make_record = logging.getLogRecordFactory()

    def without_key(*args: object, **kwargs: object) -> logging.LogRecord:
        record = make_record(*args, **kwargs)
        if key in (text := record.getMessage()):
            record.msg, record.args = text.replace(key, HIDDEN), ()
        return record

    logging.setLogRecordFactory(without_key)
    module = sys.argv[1]
    if module in UNUSED:
        unused = sys.modules[UNUSED[module]] = types.ModuleType(UNUSED[module])
        unused.__getattr__ = lambda name: None  # type: ignore[method-assign]  # whatever is imported from it
    sys.argv[1:] = [*sys.argv[2:], f"--api-key={key}"]  # a key may begin with a dash
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
