//! A provider's offer, found by its name.
//!
//! Place in the data path: none; while an endpoint is opened.

use super::config::{LibfabricConfig, MAX_WRITES};
use super::libfabric_sys::*;
use super::object::Origin;
use super::provider::{EFA_DIRECT, Provider, UNSOLICITED};
use crate::base::{Error, Result, quoted};
use std::ffi::{CStr, CString, OsStr, c_char};
use std::os::unix::ffi::OsStrExt;
use std::ptr::{NonNull, null, null_mut};

const ADVICE: &str = "set FI_LOG_LEVEL=warn to see the library's reasons, or choose another provider";

/// libfabric's variable that names the providers it uses, which launchers set to efa.
const FILTER: &str = "FI_PROVIDER";

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
    /// The provider's network; EFA has two.
    pub fabric: String,
    /// The NIC, as the provider names it.
    pub domain: String,
    /// Whether remote places are addresses; else they are offsets in their region.
    pub virtual_addresses: bool,
    /// Whether the provider chooses keys.
    pub chooses_keys: bool,
    /// Bytes of a key.
    pub key_bytes: usize,
    /// Operations of an endpoint that may be under way.
    pub queue: usize,
    /// Receives of messages that may be posted.
    pub receives: usize,
    /// Bytes of the longest write.
    pub longest: usize,
    /// Whether it registers memory of GPUs.
    pub reaches_gpus: bool,
}

/// Whether the value of one of libfabric's variables is off: fi_param_get_bool of its core.
fn is_off(value: &OsStr) -> bool {
    ["0", "no", "off", "false"].iter().any(|off| value.eq_ignore_ascii_case(off))
}

impl Facts {
    /// The provider, and where it has several fabrics the one that is used: peers over different ones do not talk.
    pub fn kind(&self) -> String {
        if self.provider == "efa" { format!("efa;{}", self.fabric) } else { self.provider.clone() }
    }

    /// Whether a batch of posts may ring one doorbell.
    pub fn batches(&self, provider: Provider) -> bool {
        provider.batches(&self.fabric)
    }
}

impl Info {
    /// The offer for a NIC: the provider's first, or of providers with devices that of its domain.
    ///
    /// # Errors
    /// `Transport` if there is none, naming the providers or domains that there are, or if the library is too old.
    pub fn find(
        library: &'static Library,
        config: &LibfabricConfig,
        provider: Provider,
        nic: usize,
        gpus: bool,
    ) -> Result<Info> {
        match Info::look_up(library, config, provider, nic, gpus) {
            // What it offers without memory of GPUs serves, with all in host memory.
            Err(_) if gpus => Info::look_up(library, config, provider, nic, false),
            found => found,
        }
    }

    fn look_up(
        library: &'static Library,
        config: &LibfabricConfig,
        provider: Provider,
        nic: usize,
        gpus: bool,
    ) -> Result<Info> {
        if let Some(oldest) = provider.oldest().filter(|oldest| library.version() < *oldest) {
            let what = format!("libfabric {} ({})", library.version(), library.path().display());
            let advice = format!("the provider {} needs {oldest} or later: install it", config.provider);
            return Err(Error::transport(format!("{what} may emulate writes"), advice));
        }
        if provider == Provider::Efa && std::env::var_os(UNSOLICITED).is_some_and(|value| is_off(&value)) {
            let advice = "unset it: an endpoint posts no receives for immediates";
            return Err(Error::config(UNSOLICITED, "off", advice));
        }
        let source = config.source.as_deref().map(CString::new).transpose().map_err(|_| {
            let advice = "give an address or name of this host";
            Error::config("source", quoted(config.source.as_deref().unwrap_or_default().as_bytes()), advice)
        })?;
        let hints = Info::hints(library, provider, config, gpus)?;
        let (node, flags) = source.as_ref().map_or((null(), 0), |node| (node.as_ptr(), FI_SOURCE));
        let mut found = null_mut();
        // SAFETY: hints of the library's own making, C strings, and a place for the answer, all alive during the call.
        let code = unsafe {
            (library.fi_getinfo)(library.asked().number(), node, null(), flags, hints.info.as_ptr(), &mut found)
        };
        match NonNull::new(found) {
            // The list is freed as one.
            Some(info) if code == 0 => {
                let chosen = Info { library, info }.chosen(config, provider, nic)?;
                chosen.limit_queue();
                Ok(chosen)
            }
            _ if code == 0 || code == -FI_ENODATA => Err(Info::missing(library, config)),
            _ => Err(Info::origin(library, config).refused("is not found", code, ADVICE)),
        }
    }

    /// The offer of a list for a NIC.
    fn chosen(self, config: &LibfabricConfig, provider: Provider, nic: usize) -> Result<Info> {
        if !provider.has_devices() {
            return Ok(self);
        }
        let offers = self.list().map(|info| (info, facts(info)));
        let offers = offers.filter(|(_, facts)| provider.admits(&facts.fabric, self.library.version()));
        let offers: Vec<(NonNull<fi_info>, Facts)> = offers.collect();
        let is_direct = |facts: &Facts| facts.fabric == EFA_DIRECT;
        let any_direct = offers.iter().any(|(_, facts)| is_direct(facts));
        let mut domains: Vec<(NonNull<fi_info>, String)> = Vec::new();
        for (info, facts) in offers {
            let known = domains.iter().any(|(_, domain)| *domain == facts.domain);
            if !known && is_direct(&facts) == any_direct {
                domains.push((info, facts.domain));
            }
        }
        let offer = if config.domains.is_empty() {
            domains.get(nic % domains.len().max(1))
        } else {
            let wanted = &config.domains[nic % config.domains.len()];
            domains.iter().find(|(_, domain)| domain == wanted).or_else(|| {
                // Without the ending a name is the NIC's in sysfs.
                domains.iter().find(|(_, domain)| domain.split('-').next() == wanted.split('-').next())
            })
        };
        let Some((info, _)) = offer else {
            let there: Vec<&str> = domains.iter().map(|(_, domain)| domain.as_str()).collect();
            let value = format!("{:?}", config.domains);
            return Err(Error::config(
                "domains",
                value,
                format!("provider {} has {}", config.provider, there.join(", ")),
            ));
        };
        // SAFETY: an info of the list.
        let copy = NonNull::new(unsafe { (self.library.fi_dupinfo)(info.as_ptr()) });
        copy.map(|info| Info { library: self.library, info }).ok_or_else(no_memory)
    }

    /// This offer and those behind it.
    fn list(&self) -> impl Iterator<Item = NonNull<fi_info>> + '_ {
        // SAFETY: a list of the library's, which `self` keeps.
        std::iter::successors(Some(self.info), |info| NonNull::new(unsafe { (*info.as_ptr()).next }))
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
        let advice = std::env::var_os(FILTER).map(|value| {
            let value = quoted(value.as_bytes());
            format!("{FILTER} is `{value}`, which limits the library's providers: unset it; else {ADVICE}")
        });
        Error::transport(what, advice.unwrap_or_else(|| ADVICE.to_owned()))
    }

    fn hints(library: &'static Library, provider: Provider, config: &LibfabricConfig, gpus: bool) -> Result<Info> {
        let name = CString::new(provider.asked(&config.provider)).map_err(|_| no_memory())?;
        // Flushes read.
        let reads = if gpus || config.flush == Some(true) { FI_READ | FI_REMOTE_READ } else { 0 };
        let (memory, mode) = if gpus { (FI_HMEM, FI_MR_HMEM) } else { (0, 0) };
        // SAFETY: null makes an empty info.
        let info = NonNull::new(unsafe { (library.fi_dupinfo)(null()) }).ok_or_else(no_memory)?;
        let hints = Info { library, info };
        // SAFETY: an info that fi_dupinfo made has all of its parts, and nobody else has it. The library frees the
        // name.
        unsafe {
            let info = hints.info.as_ptr();
            (*info).caps = FI_MSG | FI_RMA | FI_WRITE | FI_REMOTE_WRITE | provider.capabilities() | reads | memory;
            (*info).mode = FI_CONTEXT | FI_CONTEXT2;
            (*(*info).ep_attr).type_ = FI_EP_RDM;
            let domain = (*info).domain_attr;
            (*domain).mr_mode = FI_MR_LOCAL | FI_MR_VIRT_ADDR | FI_MR_ALLOCATED | FI_MR_PROV_KEY | mode;
            (*domain).threading = FI_THREAD_DOMAIN;
            (*domain).control_progress = FI_PROGRESS_MANUAL;
            (*domain).data_progress = FI_PROGRESS_MANUAL;
            (*(*info).fabric_attr).prov_name = libc::strdup(name.as_ptr());
        }
        Ok(hints)
    }

    /// Asks for no deeper queue than is used.
    fn limit_queue(&self) {
        // SAFETY: an info of the library's with all its parts, which nobody else has.
        unsafe {
            let tx = (*self.info.as_ptr()).tx_attr;
            (*tx).size = (*tx).size.min(MAX_WRITES);
        }
    }

    pub fn as_ptr(&self) -> *mut fi_info {
        self.info.as_ptr()
    }

    pub fn fabric(&self) -> *mut fi_fabric_attr {
        // SAFETY: an info of the library's.
        unsafe { (*self.info.as_ptr()).fabric_attr }
    }

    pub fn facts(&self) -> Facts {
        facts(self.info)
    }
}

fn no_memory() -> Error {
    Error::transport("no memory for libfabric's infos", "raise the limit on memory")
}

/// Facts of an info that fi_getinfo gave.
fn facts(info: NonNull<fi_info>) -> Facts {
    let text = |name: *mut c_char| {
        if name.is_null() {
            return String::new();
        }
        // SAFETY: names of such an info are C strings, or null.
        unsafe { CStr::from_ptr(name) }.to_string_lossy().into_owned()
    };
    // SAFETY: such an info has all of these parts.
    unsafe {
        let info = info.as_ptr();
        let (domain, fabric) = ((*info).domain_attr, (*info).fabric_attr);
        Facts {
            provider: text((*fabric).prov_name),
            fabric: text((*fabric).name),
            domain: text((*domain).name),
            virtual_addresses: (*domain).mr_mode & FI_MR_VIRT_ADDR != 0,
            chooses_keys: (*domain).mr_mode & FI_MR_PROV_KEY != 0,
            key_bytes: (*domain).mr_key_size,
            queue: (*(*info).tx_attr).size.clamp(1, MAX_WRITES),
            receives: (*(*info).rx_attr).size,
            longest: (*(*info).ep_attr).max_msg_size,
            reaches_gpus: (*info).caps & FI_HMEM != 0,
        }
    }
}

impl Drop for Info {
    fn drop(&mut self) {
        // SAFETY: made by the library, and freed once.
        unsafe { (self.library.fi_freeinfo)(self.info.as_ptr()) };
    }
}
