#!/bin/sh
# A tiny model learns to call a tool: data, tokenizer, model, warm start, GRPO. Everything is written to ./calculator.
set -eu
SEED=${SEED:-0}
rm -rf calculator/data calculator/tokenizer calculator/model calculator/warm calculator/runs
python3 examples/calculator/rows.py calculator/data "$SEED"
fivefold train-tokenizer bpe --vocab 400 --data calculator/data/worked.jsonl --out calculator/tokenizer
fivefold init-model qwen3 --tokenizer calculator/tokenizer --hidden 96 --layers 2 --ffn 192 --seed "$SEED" --out calculator/model
fivefold train examples/calculator/sft.yaml trainer.seed="$SEED"
fivefold export "calculator/runs/sft/checkpoints/$(cat calculator/runs/sft/checkpoints/latest)" calculator/warm
fivefold train examples/calculator/grpo.yaml trainer.seed="$SEED"
