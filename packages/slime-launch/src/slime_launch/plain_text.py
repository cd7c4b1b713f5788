"""Notes about what a command sends over a network in plain text, and how to keep it from others."""

from __future__ import annotations

import ipaddress
import os
import socket
import urllib.parse

from slime_core.redact import redacted
from slime_launch.config import Settings
from slime_rollout.engine import full_address, is_this_machine

BETWEEN_NODES = (
    "in plain text between the nodes: what Ray, the trainer's ranks and the weights' transport send, and prompts, "
    "responses and the engines' key; keep the nodes on a private network (RAY_USE_TLS=1 encrypts Ray's part alone)"
)
TUNNEL = "reach it by an encrypted tunnel that begins on this machine (ssh -L, WireGuard), or on a private network"


def plain_text_notes(settings: Settings, *, nodes: int) -> list[str]:
    """A line for each part of a run on ``nodes`` nodes that somebody on the network could read.

    A run on one machine, whose services are there, too, sends nothing over a network.
    """
    engine, rm_url, tracking = settings.engine, settings.rollout.rewards.rm_url, settings.tracking
    lines = [BETWEEN_NODES] if nodes > 1 or os.environ.get("RAY_ADDRESS") else []
    if settings.kind.generates:
        urls = engine.external_urls
        if engine.sglang_router_url is not None:
            urls = (*urls, full_address("--sglang-router-url", engine.sglang_router_url))
        if far := [url for url in urls if _is_plain(url)]:
            lines.append(f"in plain text to {', '.join(far)}: prompts, responses, weights and the key; {TUNNEL}")
        if rm_url is not None and _is_plain(rm_url):
            what = "prompts, responses and labels; give https://, or"
            lines.append(f"in plain text to {redacted(rm_url)} (--rm-url): {what} {TUNNEL}")
    if tracking.use_wandb and tracking.wandb_host is not None and _is_plain(tracking.wandb_host):
        where = redacted(tracking.wandb_host)
        lines.append(f"in plain text to {where} (--wandb-host): metrics, settings and W&B's key; give https://")
    return lines


def _is_plain(url: str) -> bool:
    """Whether others on the network could read what goes to an address. No name is looked up, which may take long."""
    parts = urllib.parse.urlsplit(url)
    try:
        ipaddress.ip_address(parts.hostname or "")
    except ValueError:
        return parts.scheme == "http" and parts.hostname not in ("localhost", socket.gethostname().lower())
    return parts.scheme == "http" and not is_this_machine(url)
