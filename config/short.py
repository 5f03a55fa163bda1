# 65.5 M tokens, to be laid over a model's config: minutes to an hour on one GPU
# python train.py config/wm16.py config/short.py --dataset=mine --out_dir=out/k16
batch_size = 8
gradient_accumulation_steps = 1
max_iters = 4000
learning_rate = 2e-3
eval_interval = 1000
eval_rows = 400
log_interval = 20
