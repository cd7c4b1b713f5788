"""The report as one HTML file: the page, its scripts and libraries, and the data, with nothing to load from elsewhere.

Two things keep text of a run from being executed, whatever a prompt or a response holds. The data are gzip in base64,
so no tag in them ends an element of the page; and the page's Content-Security-Policy allows the scripts and styles
written here, by their hashes, and nothing else. The scripts insert text as text nodes only.
"""

from __future__ import annotations

import base64
import gzip
import hashlib
import html
import re
from collections.abc import Mapping, Sequence
from functools import cache
from importlib.resources import files
from typing import Any

import orjson

STYLES = ("vendor/uplot/uPlot.min.css", "vendor/tabulator/tabulator.min.css", "report.css")
LIBRARIES = ("vendor/uplot/uPlot.iife.min.js", "vendor/tabulator/tabulator.min.js")
# In this order: each adds to the namespace that core.js makes, and main.js starts.
SCRIPTS = (
    "core.js", "data.js", "charts.js", "overview.js", "curves.js", "timeline.js", "time.js", "tokens.js", "sample.js",
    "samples.js", "ledger.js", "settings.js", "main.js",
)  # fmt: skip
LICENCES = {"uPlot": "vendor/uplot/LICENSE", "Tabulator": "vendor/tabulator/LICENSE"}
PER_TOKEN = ("tokens", "mask", "versions", "log_probs", "train_log_probs", "advantages")
PACK = 100
LEVEL = 4  # a third of the time of 6, for a tenth more bytes
_SOURCE_MAP = re.compile(r"\n(?://|/\*)# sourceMappingURL=.*\s*$")
_PLACE = re.compile(r"\{\{(\w+)\}\}")


def page(data: Mapping[str, Any]) -> str:
    """The page of one or more runs.

    What is known per token (``PER_TOKEN``) is packed by the hundred samples: the browser unpacks a pack when a sample
    of it is opened or searched, so a page of thousands of samples opens at once.

    Args:
        data: What `collect` gives; lists may be numpy arrays. NaN and infinity become ``null``, which draws a gap.

    Returns:
        HTML; opens from a file, and from a server that answers ``data.json`` if ``data["live"]``.
    """
    styles = [_asset(name) for name in STYLES]
    scripts = [_asset(name) for name in (*LIBRARIES, *SCRIPTS)]
    light, packs = split(data)
    packed = {"data": pack(light)} | {f"tokens-{number}": pack(each) for number, each in enumerate(packs)}
    parts = {
        "policy": policy(scripts, styles, live=bool(data.get("live"))),
        "styles": "\n".join(f"<style>{style}</style>" for style in styles),
        "scripts": "\n".join(f"<script>{script}</script>" for script in scripts),
        "licences": "\n".join(
            f"<h2>{library}</h2>\n<pre>{html.escape(_asset(name))}</pre>" for library, name in LICENCES.items()
        ),
        "data": "\n".join(
            f'<script type="application/octet-stream" id="{name}">{text}</script>' for name, text in packed.items()
        ),
    }
    return _PLACE.sub(lambda place: parts[place[1]], _asset("page.html"))


def split(data: Mapping[str, Any]) -> tuple[dict[str, Any], list[list[dict[str, Any]]]]:
    """Take what is known per token out of the samples.

    Returns:
        The data, whose samples hold ``"pack": [pack, place]`` instead; and the packs.
    """
    packs: list[list[dict[str, Any]]] = []
    runs = []
    for run in data["runs"]:
        samples = []
        for sample in run.get("samples") or ():
            if not packs or len(packs[-1]) == PACK:
                packs.append([])
            packs[-1].append({name: sample[name] for name in PER_TOKEN if name in sample})
            rest = {name: value for name, value in sample.items() if name not in PER_TOKEN}
            samples.append(rest | {"pack": [len(packs) - 1, len(packs[-1]) - 1]})
        runs.append({**run, "samples": samples})
    return {**data, "runs": runs}, packs


def to_json(value: Any) -> bytes:
    """JSON that a browser reads: no NaN, numpy arrays as lists, half of a surrogate pair as a question mark."""
    options = orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_NON_STR_KEYS
    try:
        return orjson.dumps(value, option=options)
    except orjson.JSONEncodeError:
        return orjson.dumps(_whole_text(value), option=options)


def pack(value: Any) -> str:
    """JSON, gzip and base64, as the page's ``unpack`` reads it."""
    return base64.b64encode(gzip.compress(to_json(value), LEVEL, mtime=0)).decode("ascii")


def policy(scripts: Sequence[str], styles: Sequence[str], *, live: bool) -> str:
    """The Content-Security-Policy: these scripts and styles, and no request but, of a live run, to its own server."""
    rules = [
        "default-src 'none'",
        f"script-src {' '.join(map(_hash, scripts))}",
        f"style-src {' '.join(map(_hash, styles))}",
        "img-src data:",
        "base-uri 'none'",
        "form-action 'none'",
        *(["connect-src 'self'"] if live else []),
    ]
    return "; ".join(rules)


@cache
def _asset(name: str) -> str:
    text = files("slime_launch.report").joinpath("assets", name).read_text(encoding="utf-8")
    return _SOURCE_MAP.sub("\n", text)


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode('ascii')}'"


def _whole_text(value: Any) -> Any:
    """The same without halves of surrogate pairs, which JSON in UTF-8 can't hold; numbers of over 64 bits are text."""
    if isinstance(value, str):
        return value.encode("utf-8", "replace").decode("utf-8")
    if isinstance(value, int) and not -(2**63) <= value < 2**64:
        return str(value)
    if isinstance(value, Mapping):
        return {_whole_text(name): _whole_text(each) for name, each in value.items()}
    return [_whole_text(each) for each in value] if isinstance(value, list | tuple) else value
