//! A provider's offer, found by its name.
//!
//! Place in the data path: none; while an endpoint is opened.

use super::config::{LibfabricConfig, MAX_WRITES};
use super::libfabric_sys::*;
use super::object::Origin;
use crate::base::{Error, Result, quoted};
use std::ffi::{CStr, CString};
use std::ptr::{NonNull, null, null_mut};

const ADVICE: &str = "set FI_LOG_LEVEL=warn to see the library's reasons, or choose another provider";

/// An info of the library's, freed when dropped.
#[derive(Debug)]
pub(super) struct Info {
    library: &'static Library,
    info: NonNull<fi_info>,
}

// SAFETY: memory that it owns, which the library reads alone.
unsafe impl Send for Info {}

/// What an offer says of the provider.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Facts {
    /// As the library names it, such as `tcp;ofi_rxm`.
    pub provider: String,
    /// Whether remote places are addresses; else they are offsets in their region.
    pub virtual_addresses: bool,
    /// Whether the provider chooses keys.
    pub chooses_keys: bool,
    /// Bytes of a key.
    pub key_bytes: usize,
    /// Writes of an endpoint that may be under way.
    pub queue: usize,
    /// Bytes of the longest write.
    pub longest: usize,
}

impl Info {
    /// The provider's first offer that serves.
    ///
    /// # Errors
    /// `Transport` if there is none, naming the providers that there are.
    pub fn find(library: &'static Library, config: &LibfabricConfig) -> Result<Info> {
        let source = config.source.as_deref().map(CString::new).transpose().map_err(|_| {
            let advice = "give an address or name of this host";
            Error::config("source", quoted(config.source.as_deref().unwrap_or_default().as_bytes()), advice)
        })?;
        let hints = Info::hints(library, &config.provider)?;
        let (node, flags) = source.as_ref().map_or((null(), 0), |node| (node.as_ptr(), FI_SOURCE));
        let mut found = null_mut();
        // SAFETY: hints of the library's own making, C strings, and a place for the answer, all alive during the call.
        let code = unsafe {
            (library.fi_getinfo)(library.asked().number(), node, null(), flags, hints.info.as_ptr(), &mut found)
        };
        match NonNull::new(found) {
            // The list is freed as one; its first is used.
            Some(info) if code == 0 => Ok(Info { library, info }),
            _ if code == 0 || code == -FI_ENODATA => Err(Info::missing(library, config)),
            _ => Err(Info::origin(library, config).refused("is not found", code, ADVICE)),
        }
    }

    /// The provider as it was asked for.
    pub fn origin(library: &'static Library, config: &LibfabricConfig) -> Origin {
        let from =
            config.source.as_ref().map_or_else(String::new, |source| format!(" at {}", quoted(source.as_bytes())));
        Origin { library, provider: format!("provider {}{from}", config.provider) }
    }

    fn missing(library: &'static Library, config: &LibfabricConfig) -> Error {
        let there = library.providers().unwrap_or_default();
        let there = if there.is_empty() { "none".to_owned() } else { there.join(", ") };
        let what = format!(
            "libfabric {} ({}) has no {} with what is needed; it has {there}",
            library.version(),
            library.path().display(),
            Info::origin(library, config).provider
        );
        Error::transport(what, ADVICE)
    }

    fn hints(library: &'static Library, provider: &str) -> Result<Info> {
        let lack = || Error::transport("no memory for libfabric's hints", "raise the limit on memory");
        let name = CString::new(provider).map_err(|_| lack())?;
        // SAFETY: null makes an empty info.
        let info = NonNull::new(unsafe { (library.fi_dupinfo)(null()) }).ok_or_else(lack)?;
        let hints = Info { library, info };
        // SAFETY: an info that fi_dupinfo made has all of its parts, and nobody else has it. The library frees the
        // name.
        unsafe {
            let info = hints.info.as_ptr();
            (*info).caps = FI_MSG | FI_RMA | FI_WRITE | FI_REMOTE_WRITE;
            (*info).mode = FI_CONTEXT | FI_CONTEXT2;
            (*(*info).ep_attr).type_ = FI_EP_RDM;
            // Answers come behind notices.
            (*(*info).tx_attr).msg_order = FI_ORDER_SAS;
            (*(*info).rx_attr).msg_order = FI_ORDER_SAS;
            let domain = (*info).domain_attr;
            (*domain).mr_mode = FI_MR_LOCAL | FI_MR_VIRT_ADDR | FI_MR_ALLOCATED | FI_MR_PROV_KEY;
            (*domain).threading = FI_THREAD_DOMAIN;
            (*domain).control_progress = FI_PROGRESS_MANUAL;
            (*domain).data_progress = FI_PROGRESS_MANUAL;
            (*(*info).fabric_attr).prov_name = libc::strdup(name.as_ptr());
        }
        Ok(hints)
    }

    pub fn as_ptr(&self) -> *mut fi_info {
        self.info.as_ptr()
    }

    pub fn fabric(&self) -> *mut fi_fabric_attr {
        // SAFETY: an info of the library's.
        unsafe { (*self.info.as_ptr()).fabric_attr }
    }

    pub fn facts(&self) -> Facts {
        // SAFETY: an info that fi_getinfo gave has all of these parts; the name is a C string or null.
        unsafe {
            let info = self.info.as_ptr();
            let (domain, name) = ((*info).domain_attr, (*(*info).fabric_attr).prov_name);
            let provider =
                if name.is_null() { String::new() } else { CStr::from_ptr(name).to_string_lossy().into_owned() };
            Facts {
                provider,
                virtual_addresses: (*domain).mr_mode & FI_MR_VIRT_ADDR != 0,
                chooses_keys: (*domain).mr_mode & FI_MR_PROV_KEY != 0,
                key_bytes: (*domain).mr_key_size,
                queue: (*(*info).tx_attr).size.clamp(1, MAX_WRITES),
                longest: (*(*info).ep_attr).max_msg_size,
            }
        }
    }
}

impl Drop for Info {
    fn drop(&mut self) {
        // SAFETY: made by the library, and freed once.
        unsafe { (self.library.fi_freeinfo)(self.info.as_ptr()) };
    }
}
