"""Whether Weights & Biases has a login here."""

from pathlib import Path

import pytest

from miles.core.wandb_account import reason_against

pytest.importorskip("wandb")


@pytest.fixture(autouse=True)
def nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A user without a login."""
    for name in ("API_KEY", "IDENTITY_TOKEN_FILE", "MODE", "BASE_URL", "DIR", "CONFIG_DIR"):
        monkeypatch.delenv(f"WANDB_{name}", raising=False)
    monkeypatch.delenv("NETRC", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("mode", ["online", None])
def test_an_online_run_without_a_login_has_three_remedies(mode: str | None) -> None:
    reason = reason_against(mode)
    assert reason is not None
    for remedy in ("https://api.wandb.ai", "wandb login", "WANDB_API_KEY", "--wandb-mode offline"):
        assert remedy in reason


@pytest.mark.parametrize("mode", ["offline", "disabled"])
def test_a_run_that_stays_here_needs_no_login(mode: str) -> None:
    assert reason_against(mode) is None


@pytest.mark.parametrize(
    ("name", "value"),
    [("WANDB_API_KEY", "k" * 40), ("WANDB_IDENTITY_TOKEN_FILE", "t"), ("WANDB_MODE", "offline")],
)
def test_the_environment_may_do(name: str, value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, value)
    assert reason_against(None) is None


def test_wandb_login_leaves_its_key_in_netrc(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    entry = f"machine %s\n  login user\n  password {'k' * 40}\n"
    (tmp_path / ".netrc").write_text(entry % "api.wandb.ai")
    assert reason_against("online") is None
    other = tmp_path / "other"
    other.write_text(entry % "github.com")
    monkeypatch.setenv("NETRC", str(other))
    assert reason_against("online") is not None
    other.write_text(entry % "wandb.example.org")
    monkeypatch.setenv("WANDB_BASE_URL", "https://wandb.example.org")
    assert reason_against("online") is None


def test_settings_files_are_read(tmp_path: Path) -> None:
    settings = tmp_path / ".config" / "wandb" / "settings"
    settings.parent.mkdir(parents=True)
    settings.write_text("[default]\nbase_url = https://wandb.example.org\n")
    assert "https://wandb.example.org" in (reason_against("online") or "")
    (tmp_path / "wandb").mkdir()
    (tmp_path / "wandb" / "settings").write_text("[default]\nmode = offline\n")
    assert reason_against(None) is None
