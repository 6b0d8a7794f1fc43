"""Whether Weights & Biases can be used here, told without importing it, which takes seconds."""

import configparser
import contextlib
import importlib.util
import netrc
import os
from collections.abc import Mapping
from pathlib import Path
from urllib.parse import urlsplit

HOST = "https://api.wandb.ai"


def reason_against(mode: str | None) -> str | None:
    """Why ``wandb.init`` cannot start a run in ``mode`` (``None``: what the environment says);
    ``None``: it can.

    Asks nobody: a key that the server does not know shows when the run starts.
    """
    if importlib.util.find_spec("wandb") is None:
        return "wandb is not installed; `pip install wandb`, or leave it out"
    settings = _settings()
    if (mode or settings.get("mode") or "online") != "online" or _has_key(settings):
        return None
    return (
        f"no login for {settings.get('base_url', HOST)}; `wandb login`, set WANDB_API_KEY, or use "
        "--wandb-mode offline"
    )


def _has_key(settings: Mapping[str, str]) -> bool:
    if settings.get("api_key") or settings.get("identity_token_file"):
        return True
    try:
        known = netrc.netrc(_netrc_file()).hosts
    except (OSError, netrc.NetrcParseError):
        return False
    # A proxy of the public server takes its login.
    return any(urlsplit(url).netloc in known for url in (settings.get("base_url", HOST), HOST))


def _netrc_file() -> Path:
    named = os.environ.get("NETRC")
    home = Path("~/.netrc").expanduser()
    return Path(named).expanduser() if named else home


def _settings() -> dict[str, str]:
    """Settings of this user, then of the working directory, then of the environment."""
    folders = (
        Path(os.environ.get("WANDB_CONFIG_DIR", "~/.config/wandb")).expanduser(),
        Path(os.environ.get("WANDB_DIR", "."), "wandb"),
    )
    parser = configparser.ConfigParser(interpolation=None)
    with contextlib.suppress(configparser.Error):  # wandb itself tells what is wrong there
        parser.read([folder / "settings" for folder in folders], encoding="utf-8")
    found = dict(parser["default"]) if parser.has_section("default") else {}
    names = ("mode", "base_url", "api_key", "identity_token_file")
    variables = {name: os.environ.get(f"WANDB_{name.upper()}") for name in names}
    return found | {name: value for name, value in variables.items() if value}
