#!/bin/sh
# A tiny model learns to add: data, tokenizer, model, warm start, GRPO, report. Everything is written to ./demo.
set -eu
SEED=${SEED:-0}
rm -rf demo/data demo/tokenizer demo/model demo/warm demo/runs
python3 examples/demo/sums.py demo/data "$SEED"
fivefold train-tokenizer char --data demo/data/train.jsonl --out demo/tokenizer
fivefold init-model qwen3 --tokenizer demo/tokenizer --hidden 128 --layers 2 --ffn 384 --seed "$SEED" --out demo/model
fivefold train examples/demo/sft.yaml trainer.seed="$SEED"
fivefold export "demo/runs/sft/checkpoints/$(cat demo/runs/sft/checkpoints/latest)" demo/warm
fivefold train examples/demo/grpo.yaml trainer.seed="$SEED"
fivefold report demo/runs/grpo --plot val/arithmetic/mean@4
