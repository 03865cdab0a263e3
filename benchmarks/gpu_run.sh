#!/bin/sh
# A whole run on GPUs from the command line: data, tokenizer, model, GRPO on t2, resume on p2, export. Needs two GPUs.
set -eu
root=$(mktemp -d)
ff="python3 -m fivefold.cli"
$ff data arithmetic --out "$root/data" --limit 1024
$ff train-tokenizer char --data "$root/data/train.parquet" --out "$root/tokenizer"
$ff init-model qwen3 --tokenizer "$root/tokenizer" --hidden 128 --layers 4 --ffn 384 --out "$root/model"
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
# PPO with a critic on t2, resumed on p2, both models exported; DAPO on d2; DPO on t2; PPO with a reward model on d2.
ppo="algorithm.name=ppo critic.warmup_steps=1 trainer.run_dir=$root/ppo"
$ff train "$root/run.yaml" $ppo
$ff train "$root/run.yaml" $ppo policy.backend=megatron:p2 trainer.steps=5
$ff export "$root/ppo/checkpoints/step-000005" "$root/out-critic" --model critic
$ff train "$root/run.yaml" algorithm.name=dapo trainer.run_dir="$root/dapo" policy.backend=megatron:d2
python3 - "$root" <<'EOF'
import json
import sys

import torch
import transformers

root = sys.argv[1]
rows = [{"prompt": f"{a}+{b}=", "chosen": f"#### {a + b}", "rejected": f"{a + b}"} for a in range(10) for b in range(10)]
with open(f"{root}/pairs.jsonl", "w") as file:
    file.write("\n".join(map(json.dumps, rows)))
config = transformers.AutoConfig.from_pretrained(f"{root}/model", num_labels=1)
classifier = transformers.AutoModelForSequenceClassification.from_config(config)
torch.nn.init.normal_(classifier.score.weight, std=0.1)
classifier.save_pretrained(f"{root}/reward-model")
transformers.AutoTokenizer.from_pretrained(f"{root}/model").save_pretrained(f"{root}/reward-model")
EOF
pairs="data.train=$root/pairs.jsonl data.val=$root/pairs.jsonl trainer.eval_every=2"
$ff train "$root/run.yaml" algorithm.name=dpo trainer.run_dir="$root/dpo" policy.optimizer.lr=1e-3 $pairs
$ff train "$root/run.yaml" algorithm.name=ppo trainer.run_dir="$root/scored" policy.backend=megatron:d2 reward.model.path="$root/reward-model"
