"""The case of a run that has nothing left to do."""

from __future__ import annotations

from pathlib import Path

from slime_launch.console import RunConsole
from slime_launch.preflight import Checked
from slime_launch.report import is_reported, make_report, report_lines, write_report
from slime_launch.tracking import read_rows


def report_if_finished(checked: Checked, output_dir: Path) -> bool:
    """Say so, and show the report again, if ``--save`` holds a run that is done.

    Args:
        checked: The command; it continues a run.
        output_dir: Where that run wrote its metrics, unless the manifest knows better.

    Returns:
        Whether it is done: trained to ``--num-rollout`` and evaluated there.
    """
    manifest, settings = checked.manifest, checked.settings
    if manifest is None or manifest.iteration < settings.run.num_rollout:
        return False
    if not read_rows(output_dir):
        output_dir = Path(manifest.output_dir)  # another --output-dir was given this time
    rows = read_rows(output_dir)
    evaluated = any(row["kind"] == "eval" and row["rollout_id"] >= settings.run.num_rollout for row in rows)
    if settings.rollout.has_eval_sets and not evaluated:
        return False
    save = Path(str(settings.megatron.save))
    checkpoint = save / manifest.checkpoint if manifest.checkpoint is not None else None
    console = RunConsole()
    console.line(f"the run in {save} is finished: {manifest.iteration} rollouts; give a larger --num-rollout to go on")
    report = make_report(rows, output_dir=output_dir, checkpoint=checkpoint, minutes=0.0)
    if output_dir.is_dir() and not is_reported(report):  # it was killed after its last checkpoint
        write_report(report)
    for line in report_lines(report):
        console.line(line)
    return True
