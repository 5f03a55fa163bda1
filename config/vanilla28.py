# vanilla of the sizes of config/wm28.py
out_dir = "out/vanilla28"
dataset = "fineweb-edu"
batch_size = 4
gradient_accumulation_steps = 32
block_size = 2048
learning_rate = 3e-4
n_layer = 28
n_embd = 1792
n_head = 14
n_kv_head = 7
head_dim = 128
n_hidden = 5376
kv = "vanilla"
