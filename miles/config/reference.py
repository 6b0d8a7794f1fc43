"""``docs/configuration.md`` from the declarations of the flags."""

from miles.config.flags import FlagSpec, flag_specs, group_heading, group_types

_HEAD = """\
# Configuration

Generated from `miles/config/` by `make docs`; do not edit.

Every setting is a flag of `train.py`. `python train.py --help` shows the same list. A flag exists
only if it works, one that has no effect with the others given is refused, and every problem of a
command line is reported at once, with what to do, before any process starts. Flags cannot be
abbreviated. With `--train-backend megatron`, Megatron's own flags are settings too
(`--help-megatron`; [training backends](training-backend.md)); with SGLang as the engine, SGLang's
are under `--sglang-` and its router's under `--router-` (`--help-sglang`, `--help-router`;
[SGLang](sglang.md)).

## Files and precedence

`--config FILE.yaml` reads flags from a file. **The command line beats the file, and the file beats
the defaults.** Of a flag that is given twice, the last one holds, so that a script's line can be
appended to. Keys are flag names without the dashes in front, with `-` or `_`:

```yaml
train-backend: fsdp
hf-checkpoint: models/tiny
prompt-data: data/train.jsonl@[0:1000]
rm-type: math
num-rollout: 100
rollout-batch-size: 32
n-samples-per-prompt: 8
rollout-max-response-len: 512
rollout-num-gpus: 2
lr: 1e-6
rollout-stop: ["###", "User:"]         # several values
train-env-vars: {NCCL_DEBUG: INFO}     # a JSON object on the command line
rewards-normalization: false           # the same as disable-rewards-normalization: true
save: null                             # the default
```

Every switch has an opposite with which the command line overrules a file: `--no-colocate`,
`--rewards-normalization` (of `--disable-rewards-normalization`), `--save-optim` (of
`--no-save-optim`).

A value that begins with two dashes is written `--flag=VALUE`.
"""


def configuration_page(config_type: type) -> str:
    """The whole page: one table for each group of flags."""
    sections = [_HEAD]
    for group, group_type in group_types(config_type).items():
        title, description = group_heading(group_type)
        sections.append(f"## {title}\n\n{description[:1].upper()}{description[1:]}\n")
        rows = [_row(spec) for spec in flag_specs(config_type) if spec.group == group]
        head = "| flag | type | default | meaning |\n|---|---|---|---|"
        sections.append("\n".join([head, *rows]) + "\n")
    return "\n".join(sections)


def _row(spec: FlagSpec) -> str:
    tri_state = spec.off is not None and spec.default is None
    flag = f"`{spec.on}`, `{spec.off}`" if tri_state else f"`{spec.name}`"
    kind = "switch" if spec.off is not None else f"`{spec.metavar}`"
    default = f"`{spec.default_text}`" if spec.default_text and spec.off is None else ""
    cells = (flag, kind, default, spec.help)
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"
