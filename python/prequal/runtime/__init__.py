"""What decides, watches and proves the fast paths: fingerprint, gate, qualification, flags, telemetry."""
