//! Keys of endpoints and of memory: nobody guesses one.
//!
//! Place in the data path: none; opening, registering and resets alone.

use crate::base::{Error, Result};

/// A random number.
///
/// # Errors
/// `Transport` if the system gives none.
pub(super) fn random() -> Result<u64> {
    let lack = |error| Error::transport(format!("the system gives no random numbers ({error})"), "see getrandom(2)");
    getrandom::u64().map_err(lack)
}
