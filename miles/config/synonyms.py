"""What other programs of the field call our flags, where the spelling is no help to find ours."""

_NAMES: dict[str, str] = {
    "--advantage-estimator": "algo algorithm adv-estimator",
    "--clip-grad": "grad-clip gradient-clipping max-grad-norm",
    "--eps-clip": "clip-eps clip-range clip-ratio epsilon",
    "--eval-interval": "eval-freq eval-steps test-freq",
    "--eval-prompt-data": "eval-data eval-dataset val-data val-files",
    "--global-batch-size": "train-batch-size",
    "--hf-checkpoint": "model model-name model-name-or-path model-path pretrain",
    "--kl-loss-coef": "beta kl-beta",
    "--load-debug-rollout-data": "debug-train-only train-only",
    "--load": "resume resume-from resume-from-checkpoint",
    "--lr": "learning-rate actor-learning-rate",
    "--lr-decay-style": "lr-scheduler lr-scheduler-type",
    "--micro-batch-size": "per-device-train-batch-size micro-train-batch-size",
    "--n-samples-per-prompt": "group-size n-samples num-generations num-samples",
    "--num-epoch": "epochs num-epochs num-train-epochs total-epochs",
    "--num-rollout": "max-steps num-steps num-iterations total-steps",
    "--prompt-data": "data dataset dataset-name train-data train-dataset train-files",
    "--rm-type": "reward reward-fn reward-function reward-funcs",
    "--rollout-batch-size": "rollout-size num-prompts prompts-per-step",
    "--rollout-max-context-len": "max-length max-model-len max-seq-len",
    "--rollout-max-prompt-len": "max-prompt-length prompt-max-len",
    "--rollout-max-response-len": "max-completion-length max-new-tokens max-response-length "
    "max-tokens",
    "--rollout-temperature": "temperature",
    "--rollout-top-k": "top-k",
    "--rollout-top-p": "top-p",
    "--run-dir": "log-dir logging-dir",
    "--tensorboard-dir": "tb-dir tb-project-name use-tensorboard",
    "--save": "checkpoint-dir output-dir save-dir save-path",
    "--save-interval": "save-freq save-steps",
}

SYNONYMS: dict[str, str] = {
    f"--{word}": flag for flag, words in _NAMES.items() for word in words.split()
}
"""Another program's flag -> ours."""
