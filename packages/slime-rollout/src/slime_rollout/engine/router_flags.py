"""The flags of the installed sglang-router, as ``--router-*``: which are passed to the router that a run starts."""

from __future__ import annotations

import argparse
import functools
from collections.abc import Mapping

from slime_core.flags import FlagSpec

ROUTER_PREFIX = "--router-"
# What to use instead of flags that slime sets itself.
_INSTEAD = {
    "use --sglang-router-ip": ("host",),
    "use --sglang-router-port": ("port",),
    "use --sglang-router-request-timeout-secs": ("request-timeout-secs",),
    "slime registers its engines": (
        *("worker-urls", "service-discovery", "selector", "service-discovery-port", "service-discovery-namespace"),
        *("prefill-selector", "decode-selector", "dp-aware", "enable-igw"),
    ),
    "use worker_type in --sglang-config": ("pd-disaggregation", "prefill", "decode", "mini-lb"),
    "engines are SGLang's": ("backend",),
    "slime chooses a free port of the loopback address": ("prometheus-port", "prometheus-host"),
    "the router takes the key of engines; use --sglang-api-key": ("api-key",),
    "slime sends the router one key, --sglang-api-key": ("control-plane-api-keys", "control-plane-audit-enabled"),
    "slime sends the router no token": ("jwt-issuer", "jwt-audience", "jwt-jwks-uri", "jwt-role-mapping"),
    "slime talks plain HTTP to the router, and the router to engines": (
        *("client-cert-path", "client-key-path", "ca-cert-paths", "tls-cert-path", "tls-key-path"),
    ),
}
ROUTER_CONTROLLED: Mapping[str, str] = {name: advice for advice, names in _INSTEAD.items() for name in names}
"""Flags that slime sets itself → what to use instead."""


@functools.cache
def router_specs() -> dict[str, FlagSpec]:
    """The flags that a run may pass to its router, by their names there, such as ``cache-threshold``."""
    from sglang_router.router_args import RouterArgs

    parser = argparse.ArgumentParser(add_help=False)
    RouterArgs.add_cli_args(parser, use_router_prefix=False)
    names = {action: option[2:] for action in parser._actions for option in action.option_strings}
    return {
        name: FlagSpec(
            name=ROUTER_PREFIX + name,
            dest=f"router_{name.replace('-', '_')}",
            type=bool if action.nargs == 0 else action.type if action.type in (int, float) else str,
            default=None,
            help=" ".join((action.help or "").replace("%(default)s", str(action.default)).split()),
            choices=tuple(map(str, action.choices)) if action.choices else None,
            nargs="+" if action.nargs in ("+", "*") else None,
        )
        for action, name in names.items()
        if name not in ROUTER_CONTROLLED and name != "policy"
    }
