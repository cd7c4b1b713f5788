"""Processes that never outlive the one that started them.

    starter ──pipe──▶ supervisor ──▶ command ──▶ its children, their children …
                      (subreaper)               (also those that detach themselves)

The starter holds the pipe's write end, the supervisor its read end. However the starter ends, SIGKILL included, the
kernel closes the write end, and the supervisor ends every process below it. A parent-death signal alone would not do:
it reaches only the direct child, and it follows the thread that forked, not the process.
"""

from slime_rollout.supervise.supervised import Supervised, SupervisionError, run_under_supervisor

__all__ = ["Supervised", "SupervisionError", "run_under_supervisor"]
