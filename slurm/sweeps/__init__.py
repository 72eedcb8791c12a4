"""Many runs as one array job."""
