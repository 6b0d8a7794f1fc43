"""How responses are generated."""

from dataclasses import dataclass
from typing import Annotated, Literal

from miles.config.flags import Doc


@dataclass(frozen=True, kw_only=True)
class RolloutConfig:
    """Rollout: how responses are generated."""

    hf_checkpoint: Annotated[
        str | None,
        Doc("Hugging Face directory: tokenizer, config, weights of engine and FSDP (required)."),
    ] = None
    rollout_engine: Annotated[
        Literal["auto", "sglang", "embedded"],
        Doc("Engine server; auto: SGLang where it and an accelerator exist, else embedded."),
    ] = "auto"
    rollout_external: Annotated[
        bool,
        Doc(
            "Use engines that were launched elsewhere (--rollout-external-engine-addrs): they are "
            "checked and given weights, neither started nor stopped. Their number times "
            "--rollout-num-gpus-per-engine is --rollout-num-gpus, which is then not to be given."
        ),
    ] = False
    rollout_external_engine_addrs: Annotated[
        tuple[str, ...], Doc("HOST:PORT of each of those engines.")
    ] = ()
    rollout_temperature: Annotated[
        float, Doc("Sampling temperature; the trainer divides its logits by it too.")
    ] = 1.0
    rollout_top_p: Annotated[float, Doc("Nucleus sampling.")] = 1.0
    rollout_top_k: Annotated[int, Doc("Top-k sampling; -1 is off.")] = -1
    rollout_max_context_len: Annotated[
        int | None, Doc("Most tokens of prompt and response together.")
    ] = None
    rollout_max_prompt_len: Annotated[
        int | None, Doc("Leave out longer prompts when loading (their number is logged).")
    ] = None
    rollout_max_response_len: Annotated[int | None, Doc("Most new tokens (required).")] = None
    rollout_skip_special_tokens: Annotated[
        bool, Doc("Leave special tokens out of the response text.")
    ] = False
    rollout_stop: Annotated[tuple[str, ...], Doc("Stop strings.")] = ()
    rollout_stop_token_ids: Annotated[tuple[int, ...], Doc("Stop token ids.")] = ()
    deterministic_rollout: Annotated[
        bool,
        Doc(
            "Bit-equal reruns: fixed prompt-to-engine map, admission in order, seeded sampling "
            "(embedded engine)."
        ),
    ] = False
    over_sampling_batch_size: Annotated[
        int | None,
        Doc("Prompts submitted at a time; more than --rollout-batch-size races for the batch."),
    ] = None
    partial_rollout: Annotated[
        bool, Doc("Keep aborted responses and go on with them in a later rollout.")
    ] = False
    mask_offpolicy_in_partial_rollout: Annotated[
        bool, Doc("Train only the tokens that the current weights wrote.")
    ] = False
    generate_max_turns: Annotated[
        int, Doc("Assistant turns of the multi-turn generate function.")
    ] = 16
    generate_tool_timeout_s: Annotated[float, Doc("Time-out of one tool call, s.")] = 60.0
    sglang_server_concurrency: Annotated[int, Doc("Requests in flight at one engine.")] = 512
    sglang_context_length: Annotated[
        int | None, Doc("Engine context length; by default the model's.")
    ] = None
    sglang_max_running_requests: Annotated[
        int | None, Doc("Sequences that an engine decodes at once; by default 256.")
    ] = None
    sglang_max_total_tokens: Annotated[
        int | None, Doc("Tokens in an engine's key/value cache; by default as memory allows.")
    ] = None
    sglang_mem_fraction_static: Annotated[
        float | None,
        Doc(
            "Share of the device for an engine's weights and key/value cache (SGLang only); by "
            "default SGLang's, 0.8 with --colocate."
        ),
    ] = None
    sglang_dtype: Annotated[
        Literal["auto", "float16", "bfloat16", "float32"],
        Doc("Engine dtype; auto: float16 under --fp16, else the checkpoint's."),
    ] = "auto"
    sglang_log_level: Annotated[str, Doc("Log level of the engine server.")] = "warning"
    sglang_router_ip: Annotated[
        str | None,
        Doc("Address of a router that runs already; Miles then starts none (SGLang only)."),
    ] = None
    sglang_router_port: Annotated[int | None, Doc("Port of --sglang-router-ip.")] = None
    pause_generation_mode: Annotated[
        Literal["abort", "retract", "in_place"],
        Doc("What requests in flight do during a weight update."),
    ] = "retract"
    rollout_engine_start_timeout_s: Annotated[
        float, Doc("How long an engine may take from its start until it serves, s.")
    ] = 600.0
    use_fault_tolerance: Annotated[
        bool,
        Doc(
            "Replace engines that end or hang, and go on; off: the run ends with the first that "
            "ends. On by default: a long run should outlive an engine."
        ),
    ] = True
    rollout_health_check_interval: Annotated[
        float, Doc("Seconds between health probes of the engines; 0 is off.")
    ] = 30.0
    rollout_health_check_first_wait: Annotated[
        float, Doc("Seconds after engines begin to generate during which none is probed.")
    ] = 0.0
    rollout_health_check_timeout: Annotated[float, Doc("Time-out of a health probe, s.")] = 30.0
    rollout_request_timeout_s: Annotated[float, Doc("Time-out of one generate request, s.")] = (
        14400.0
    )
