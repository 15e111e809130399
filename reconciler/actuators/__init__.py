"""What turns wishes into kernel state: diff, order, record, write, read back."""
