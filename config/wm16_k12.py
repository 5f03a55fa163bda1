# the paper's model with three quarters of the cache:
# torchrun --standalone --nproc_per_node=8 train.py config/wm16_k12.py
out_dir = "out/wm16_k12"
dataset = "fineweb-edu"
batch_size = 16  # rows per process and micro-step; 8 in all make the global batch of 128
gradient_accumulation_steps = 8
block_size = 2048
max_iters = 30518  # 8.0 B tokens
learning_rate = 3e-4
n_layer = 16
kv = "whitematter"
n_channels = 12
router_stride = 2
n_groups = 8
n_nograd = 1
n_grad = 2
