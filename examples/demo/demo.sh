#!/bin/sh
# A tiny model learns to add: data, tokenizer, model, warm start, GRPO, report. Everything is written to ./demo.
set -eu
rm -rf demo/data demo/tokenizer demo/model demo/warm demo/runs
fivefold data arithmetic --below 20 --limit 336 --out demo/data
fivefold train-tokenizer char --data demo/data/train.parquet --out demo/tokenizer
fivefold init-model qwen3 --tokenizer demo/tokenizer --hidden 128 --layers 2 --ffn 384 --out demo/model
fivefold train examples/demo/sft.yaml
fivefold export "demo/runs/sft/checkpoints/$(cat demo/runs/sft/checkpoints/latest)" demo/warm
fivefold train examples/demo/grpo.yaml
fivefold report demo/runs/grpo --plot val/arithmetic/accuracy
