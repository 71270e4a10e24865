"""What happens before any worker starts: checks of the machine and the config, measuring, planning and forecasting."""
