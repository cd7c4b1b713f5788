"""``slime-launch report``: a page about a run, or about several side by side."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import secrets
import sys
from collections.abc import Sequence
from pathlib import Path

from slime_core.files import naming_damage, write_whole
from slime_core.flags import Config, flag, flag_specs
from slime_core.needs import given
from slime_launch.console import RunConsole
from slime_launch.errors import FlagError
from slime_launch.parser import FlagGroup, build_parser, parse
from slime_launch.plan.command import split_words
from slime_launch.plan.of_run import profile_of_runs
from slime_launch.plan.profile import write_profile
from slime_launch.report.collect import report_data
from slime_launch.report.page import page, to_json
from slime_launch.report.serve import ADDRESS, make_server
from slime_launch.report.trace import chrome_trace

PAGE_FILE = "report.html"
DESCRIPTION = """\
Write a page about a run, which needs no network: its curves, who was busy when, samples token by token, settings.
RUN is the run's --output-dir. Several runs are shown side by side."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ReportConfig(Config, needs=()):
    """The flags of a report."""

    output: str | None = flag(
        None, metavar="FILE", help=f"the page; {PAGE_FILE} in the first run's directory unless given"
    )
    trace: str | None = flag(
        None, metavar="FILE", help="write the timeline as a Chrome trace too, which ui.perfetto.dev opens"
    )
    profile: str | None = flag(
        None, metavar="FILE", help="write the runs' speeds too, for `slime-launch plan --simulate --profile FILE`"
    )
    json: str | None = flag(None, metavar="FILE", help="write what the page shows as JSON too")
    serve: bool = flag(False, help="show the page of a run that goes on at a port of 127.0.0.1, until Ctrl-C")
    port: int = flag(0, help="port for --serve; 0 takes a free one", least=0, most=65535, needs=given("serve"))


def report(argv: Sequence[str]) -> int:
    """Write or serve the page; returns the exit code.

    Raises:
        FlagError: No run is given, a file cannot be written, or the port is taken.
        PreflightError: A directory holds no run.
    """
    specs = flag_specs(ReportConfig)
    groups = [FlagGroup("report", tuple(specs))]
    parser = build_parser(groups, prog="slime-launch report", description=DESCRIPTION, words="RUN [RUN ...]")
    if "--help" in argv or "-h" in argv:
        parser.print_help()
        return 0
    own, runs = split_words(argv, {spec.name: not spec.is_switch for spec in specs})
    config = ReportConfig(**parse(groups, parser, [*own, *(word for word in runs if word.startswith("-"))]))
    directories = [Path(word) for word in runs]
    if not directories:
        raise FlagError("report needs a run's --output-dir, such as runs/first-run")
    if config.serve:
        return _serve(directories, config.port)
    try:
        _write(directories, config)
    except OSError as error:
        raise FlagError(f"{error.filename} cannot be written ({error.strerror}); give another file") from None
    return 0


def _write(directories: Sequence[Path], config: ReportConfig) -> None:
    """Write the page, and what else is asked for."""
    target = Path(config.output or directories[0] / PAGE_FILE)
    with RunConsole(sys.stderr).wait("write the page"):
        data = report_data(directories)
        with naming_damage(" or ".join(map(str, directories))):
            text = page(data)
        write_whole(target, text)
    print(f"open {target}")
    if config.trace is not None:
        write_whole(Path(config.trace), json.dumps(chrome_trace(data)))
        print(f"timeline: {config.trace}, for https://ui.perfetto.dev")
    if config.profile is not None:
        write_profile(found := profile_of_runs(directories), Path(config.profile))
        print(f"speeds: {config.profile}")
        for note in found.notes:
            print(f"  a guess in it: {note}")
    if config.json is not None:
        write_whole(Path(config.json), to_json(data).decode())


def _serve(directories: Sequence[Path], port: int) -> int:
    token = secrets.token_urlsafe(24)
    try:
        server = make_server(directories, port, token)
    except OSError as error:
        raise FlagError(f"--port {port} cannot be used ({error}); give another, or 0 for a free one") from None
    print(f"open http://{ADDRESS}:{server.server_port}/?token={token} ; Ctrl-C ends it")
    sys.stdout.flush()
    with server, contextlib.suppress(KeyboardInterrupt):
        server.serve_forever()
    return 0
