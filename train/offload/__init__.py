"""What a rank keeps elsewhere than on its device: in the host's memory and on NVMe."""
