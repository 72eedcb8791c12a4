"""What nccl-tests and NCCL itself have written."""
