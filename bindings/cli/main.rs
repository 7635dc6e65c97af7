//! The program `tokenyard`: [`tokenyard::cli::run`] with the arguments, the streams and the environment of this
//! process.

use std::process::ExitCode;

use tokenyard::cli::{Host, run};

fn main() -> ExitCode {
    // Kernels of ranks that share a GPU wait for one another, so their streams must not share one of its queues, of
    // which a driver makes 8 unless the variable is set.
    if std::env::var_os("CUDA_DEVICE_MAX_CONNECTIONS").is_none() {
        // SAFETY: nothing else runs yet that could read the environment.
        unsafe { std::env::set_var("CUDA_DEVICE_MAX_CONNECTIONS", "32") };
    }
    run(std::env::args_os().skip(1), Host::process(&mut std::io::stdout())).into()
}
