#!/bin/sh
# A whole run on GPUs from the command line: data, tokenizer, model, GRPO on t2, resume on p2, export. Needs two GPUs.
set -eu
root=$(mktemp -d)
ff="python3 -m fivefold.cli"
$ff data arithmetic --out "$root/data" --limit 1024
$ff tokenizer char --data "$root/data/train.parquet" --out "$root/tokenizer"
$ff model qwen3 --tokenizer "$root/tokenizer" --hidden 128 --layers 4 --ffn 384 --out "$root/model"
cat > "$root/run.yaml" <<EOF
model: {path: $root/model}
policy: {backend: "megatron:t2", dtype: bfloat16, tokens_per_micro_batch: 4096, optimizer: {lr: 1.0e-4}}
algorithm: {name: grpo, group_size: 8, kl: {coef: 0.01}}
data:
  train: [$root/data/train.parquet]
  val: [$root/data/test.parquet]
  prompts_per_step: 32
  max_prompt_tokens: 16
  max_response_tokens: 64
reward: {functions: {format: 1.0}}
trainer: {run_dir: $root/run, steps: 3, device: cuda}
EOF
$ff train "$root/run.yaml"
$ff train "$root/run.yaml" policy.backend=megatron:p2 trainer.steps=5
$ff export "$root/run/checkpoints/step-000005" "$root/out"
ls "$root/out"
