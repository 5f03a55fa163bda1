# the paper's ablations, 327.7 M tokens, to be laid over a model's config on one GPU:
# python train.py config/wm16_k4.py config/ablation.py --out_dir=out/ablation_k4
batch_size = 8
gradient_accumulation_steps = 1
max_iters = 20000
