"""What needs several hosts: they are brought up on one machine."""
