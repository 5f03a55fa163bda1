# the paper's ablation of the router, one channel:
# torchrun --standalone --nproc_per_node=8 train.py config/static16_k1.py
out_dir = "out/static16_k1"
dataset = "fineweb-edu"
batch_size = 16  # rows per process and micro-step; 8 in all make the global batch of 128
gradient_accumulation_steps = 8
block_size = 2048
max_iters = 30518  # 8.0 B tokens
learning_rate = 3e-4
n_layer = 16
kv = "whitematter"
router = "static"  # mixing weights that do not depend on the token
n_channels = 1
n_groups = 8
n_nograd = 1
n_grad = 2
