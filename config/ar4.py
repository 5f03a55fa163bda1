# the paper's model for the convergence of prefill, trained by the exact autoregressive solution:
# one cyclic pass of as many groups as tokens is that solution, gradients through all of it
out_dir = "out/ar4"
dataset = "fineweb-edu"
batch_size = 96
gradient_accumulation_steps = 1
block_size = 1024
max_iters = 800  # 78.6 M tokens
learning_rate = 1e-3  # ours; the paper's setup has 3e-4
eval_interval = 200
eval_rows = 96  # without a CUDA graph an evaluation is a thousand small steps
n_layer = 4
kv = "whitematter"
n_channels = 4
n_groups = 1024
n_nograd = 0
n_grad = 1
