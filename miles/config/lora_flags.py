"""Names of LoRA's flags, which no backend of this version has."""

_NAMES = """
    experts-shared-outer-loras exclude-modules lora-adapter-path lora-alpha lora-base-cpu-backup
    lora-dropout lora-rank lora-sync-from-tensor lora-train-only lora-type multi-lora-adapter
    multi-lora-api-port multi-lora-backend-path multi-lora-disable-service-mode
    multi-lora-http-server-path multi-lora-idle-poll-s multi-lora-max-adapter-global-batch-size
    multi-lora-max-coalesce-wait-s multi-lora-max-empty-wait-s multi-lora-n-adapters target-modules
"""

LORA_FLAGS = frozenset(_NAMES.split())
"""Without the dashes in front."""


def is_lora_flag(name: str) -> bool:
    """Whether a flag asks for LoRA, under the names above or under another library's."""
    bare = name.removeprefix("--").replace("_", "-")
    return bare in LORA_FLAGS or not {"lora", "qlora", "peft"}.isdisjoint(bare.split("-"))
