# FusedKV-Lite (Lin et al., 2026):
# torchrun --standalone --nproc_per_node=8 train.py config/fusedkv16_lite.py
out_dir = "out/fusedkv16_lite"
dataset = "fineweb-edu"
batch_size = 16  # rows per process and micro-step; 8 in all make the global batch of 128
gradient_accumulation_steps = 8
block_size = 2048
max_iters = 30518  # 8.0 B tokens
learning_rate = 3e-4
n_layer = 16
kv = "fusedkv_lite"
