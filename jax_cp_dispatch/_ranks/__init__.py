"""What every collective call needs: its ranks, their context, transports, processes and GPUs."""
