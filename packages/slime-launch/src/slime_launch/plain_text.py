"""What a command sends over a network in plain text, and how to keep it from others."""

from __future__ import annotations

import ipaddress
import os
import socket
import urllib.parse
from collections.abc import Iterator

from slime_core.redact import redacted
from slime_launch.config import Settings
from slime_rollout.engine.addresses import full_address, is_this_machine

BETWEEN_NODES = (
    "in plain text between the nodes: what Ray, the trainer's ranks and the weights' transport send, and prompts, "
    "responses and the engines' key; keep the nodes on a private network (RAY_USE_TLS=1 encrypts Ray's part alone)"
)
TUNNEL = "reach it by an encrypted tunnel that begins on this machine (ssh -L, WireGuard), or on a private network"


def plain_text_notes(settings: Settings, *, nodes: int) -> list[str]:
    """A line for each part of a run on ``nodes`` nodes that somebody on the network could read.

    A run on one machine, whose services are there, too, sends nothing over a network.
    """
    lines = [BETWEEN_NODES] if nodes > 1 or os.environ.get("RAY_ADDRESS") else []
    return [*lines, *_services(settings)]


def _services(settings: Settings) -> Iterator[str]:
    engine, rewards, tracking = settings.engine, settings.rollout.rewards, settings.tracking
    if settings.generates:
        urls = engine.external_urls
        if engine.sglang_router_url is not None:
            urls = (*urls, full_address("--sglang-router-url", engine.sglang_router_url))
        if far := [url for url in urls if _is_plain(url)]:
            yield f"in plain text to {', '.join(far)}: prompts, responses, weights and the key; {TUNNEL}"
        if rewards.rm_url is not None and _is_plain(rewards.rm_url):
            where = redacted(rewards.rm_url)
            yield f"in plain text to {where} (--rm-url): prompts, responses and labels; give https://, or {TUNNEL}"
    if tracking.use_wandb and tracking.wandb_host is not None and _is_plain(tracking.wandb_host):
        where = redacted(tracking.wandb_host)
        yield f"in plain text to {where} (--wandb-host): metrics, settings and W&B's key; give https://"


def _is_plain(url: str) -> bool:
    """Whether others on the network could read what goes to an address. No name is looked up, which may take long."""
    parts = urllib.parse.urlsplit(url)
    try:
        ipaddress.ip_address(parts.hostname or "")
    except ValueError:
        return parts.scheme == "http" and parts.hostname not in ("localhost", socket.gethostname().lower())
    return parts.scheme == "http" and not is_this_machine(url)
