# FusedKV-Lite (Lin et al., 2026); all else is default, as in config/wm16.py
out_dir = "out/fusedkv16_lite"
dataset = "fineweb-edu"
kv = "fusedkv_lite"
