"""What a run tells of itself: metrics, TensorBoard, the progress line, MFU, the closing report."""
