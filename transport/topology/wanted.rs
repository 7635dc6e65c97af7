//! What the user asks for instead of what the machine's facts suggest.

use super::cpus::Cpus;
use super::machine::Device;
use super::pci::PciAddress;
use super::record::{bytes_of, is_name};
use crate::base::{Error, Result, quoted};
use std::collections::BTreeMap;
use std::path::Path;

/// Most NICs that one option or one line names.
const MAX_NICS: usize = 256;

/// What the user asks for. The default asks for nothing: the facts decide.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Wanted {
    /// NICs for all GPUs.
    pub nics: WantedNics,
    /// CPUs for all GPUs, instead of all that the process may use; still one of each core, and dealt out.
    pub cores: Option<Cpus>,
    /// The network that uses the NICs: others are left out.
    pub kind: NicKind,
    /// By GPU: exactly these NICs, exactly these CPUs.
    pub(super) gpus: BTreeMap<PciAddress, OfGpu>,
}

/// NICs that the user asks for.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub enum WantedNics {
    /// Those that the facts suggest.
    #[default]
    Chosen,
    /// Of those, at most so many for each GPU.
    Most(usize),
    /// These, by name of the RDMA device or by PCI address, dealt out as others would be. Nothing is left out of them.
    Named(Vec<String>),
}

/// One GPU's line of a file.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct OfGpu {
    pub line: usize,
    pub nics: Option<Vec<String>>,
    pub cores: Option<Cpus>,
}

/// The NICs that a network can use.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum NicKind {
    /// All.
    #[default]
    Any,
    /// Elastic Fabric Adapters, for libfabric's provider `efa`.
    Efa,
    /// All others, for verbs: EFA has no reliable connections.
    Verbs,
}

impl NicKind {
    /// Whether it has the device.
    pub(super) fn has(self, nic: &Device) -> bool {
        match self {
            NicKind::Any => true,
            NicKind::Efa => nic.is_efa(),
            NicKind::Verbs => !nic.is_efa(),
        }
    }
}

impl WantedNics {
    /// Reads the value of `--nics`: a number, or names and PCI addresses separated by commas.
    ///
    /// # Errors
    /// What to give instead.
    pub fn parse(text: &str) -> std::result::Result<WantedNics, String> {
        match text.parse::<usize>() {
            Ok(most @ 1..=MAX_NICS) => Ok(WantedNics::Most(most)),
            Ok(_) => Err(format!("give a number from 1 to {MAX_NICS}, or names")),
            Err(_) => named(text).map(WantedNics::Named),
        }
    }
}

fn named(text: &str) -> std::result::Result<Vec<String>, String> {
    let names: Vec<String> = text.split(',').map(str::to_string).collect();
    let known = |name: &String| is_name(name) || PciAddress::parse(name).is_some();
    let mut once = names.clone();
    once.sort();
    once.dedup();
    if names.len() > MAX_NICS || once.len() < names.len() || !names.iter().all(known) {
        return Err(format!(
            "give at most {MAX_NICS} RDMA devices, each once, separated by commas, as in mlx5_0,0000:55:00.0"
        ));
    }
    Ok(names)
}

impl Wanted {
    /// NICs and CPUs for all GPUs.
    pub fn new(nics: WantedNics, cores: Option<Cpus>) -> Wanted {
        Wanted { nics, cores, ..Wanted::default() }
    }

    /// The same, for a network that uses NICs of this kind.
    #[must_use]
    pub fn of_kind(self, kind: NicKind) -> Wanted {
        Wanted { kind, ..self }
    }

    /// Adds what a file says. Its lines are empty, or a comment after `#`, or
    /// `gpu 0000:59:00.0 nics=rdmap85s0,0000:56:00.0 cores=0-11`, with `nics`, `cores` or both. They replace what would
    /// be chosen for that GPU, and are taken as they are.
    ///
    /// # Errors
    /// `Config` that names the line, or if the file cannot be read or is longer than
    /// [`MAX_BYTES`](super::record::MAX_BYTES).
    pub fn and_file(self, path: &Path) -> Result<Wanted> {
        let bytes = bytes_of(path)?;
        let Ok(text) = std::str::from_utf8(&bytes) else {
            return Err(Error::config(
                "choice of NICs and cores",
                "not text",
                "give a file of lines such as gpu 0000:59:00.0 cores=0-3",
            ));
        };
        self.and_text(text)
    }

    /// As [`and_file`](Wanted::and_file), of a text.
    ///
    /// # Errors
    /// `Config` that names the line.
    pub fn and_text(mut self, text: &str) -> Result<Wanted> {
        for (at, line) in text.lines().enumerate() {
            let content = line.split('#').next().unwrap_or_default().trim();
            if !content.is_empty() {
                self.line(at + 1, content).map_err(|advice| {
                    let short: String = content.chars().take(60).collect();
                    let value = format!("line {}, `{}`", at + 1, quoted(short.as_bytes()));
                    Error::config("choice of NICs and cores", value, advice)
                })?;
            }
        }
        Ok(self)
    }

    fn line(&mut self, line: usize, content: &str) -> std::result::Result<(), String> {
        let mut words = content.split_whitespace();
        let (Some("gpu"), Some(gpu)) = (words.next(), words.next().and_then(PciAddress::parse)) else {
            return Err("give gpu and its PCI address, as in gpu 0000:59:00.0 nics=mlx5_0 cores=0-3".to_string());
        };
        let mut of = OfGpu { line, ..OfGpu::default() };
        for word in words {
            match word.split_once('=') {
                Some(("nics", list)) if of.nics.is_none() => of.nics = Some(named(list)?),
                Some(("cores", list)) if of.cores.is_none() => of.cores = Some(Cpus::listed(list)?),
                _ => return Err("after the address come nics=LIST and cores=LIST, each once".to_string()),
            }
        }
        if of.nics.is_none() && of.cores.is_none() {
            return Err("give nics=LIST, cores=LIST or both".to_string());
        }
        match self.gpus.insert(gpu, of) {
            Some(before) => Err(format!("line {} is of the same GPU; give one", before.line)),
            None => Ok(()),
        }
    }
}
