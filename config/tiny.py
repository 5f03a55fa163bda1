# 0.8 million parameters on the English that Python carries: minutes on a laptop's CPU
out_dir = "out/tiny"
dataset = "python"
batch_size = 4
block_size = 256
gradient_accumulation_steps = 1
max_iters = 500
learning_rate = 5e-3
eval_interval = 250
eval_rows = 160
n_layer = 4
n_embd = 128
n_head = 4
n_kv_head = 2
head_dim = 32
n_hidden = 384
n_channels = 4
n_groups = 4  # half the paper's 8: on a CPU it is the number of small operations that costs
