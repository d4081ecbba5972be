#!/bin/sh
# ms-swift: Qwen3-30B-A3B with the settings that the paper's OLMoE sources had (those of its Qwen3
# are not published). UNTESTED here. 8 GPUs of 80 GB with ZeRO-3, or use `megatron sft` instead,
# which is said to be about ten times as fast for this model.
NPROC_PER_NODE=8 swift sft \
    --model Qwen/Qwen3-30B-A3B \
    --train_type full \
    --dataset math.jsonl \
    --torch_dtype bfloat16 \
    --max_length 4096 \
    --packing true \
    --attn_impl flash_attn \
    --per_device_train_batch_size 1 \
    --gradient_accumulation_steps 4 \
    --num_train_epochs 2 \
    --learning_rate 2e-5 \
    --lr_scheduler_type linear \
    --warmup_ratio 0.03 \
    --weight_decay 0 \
    --router_aux_loss_coef 0 \
    --deepspeed zero3 \
    --output_dir math
