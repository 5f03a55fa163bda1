# LCKV, 4 layers with keys and values of their own (Wu and Tu, 2024):
# torchrun --standalone --nproc_per_node=8 train.py config/lckv16_w4.py
out_dir = "out/lckv16_w4"
dataset = "fineweb-edu"
batch_size = 16  # rows per process and micro-step; 8 in all make the global batch of 128
gradient_accumulation_steps = 8
block_size = 2048
max_iters = 30518  # 8.0 B tokens
learning_rate = 3e-4
n_layer = 16
kv = "lckv"
lckv_w = 4
n_groups = 1  # Jacobi, over the condensed layers alone
n_nograd = 7
n_grad = 2
