//! Named link models: the NICs of one rank on existing networks, each number with its origin.
//!
//! Place in the data path: beside the simulated network, which they make timed; a word of the command line becomes one
//! of them. Pure data and parsing, on any thread; nothing here does I/O.

use super::config::LinkModel;
use crate::base::{Error, Result};

/// The NICs of one rank, all alike.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Link {
    /// How many.
    pub nics: u8,
    /// Each of them.
    pub nic: LinkModel,
}

impl Link {
    /// As `SimConfig::nics` wants them.
    pub fn models(&self) -> Vec<LinkModel> {
        vec![self.nic; usize::from(self.nics)]
    }

    /// Rate of all NICs together, one way.
    pub fn gbps(&self) -> f64 {
        self.nic.gbps * f64::from(self.nics)
    }

    /// The least time in which so many bytes leave or reach a rank, spread over its NICs; nothing takes no time.
    pub fn floor_us(&self, bytes: f64) -> f64 {
        if bytes > 0.0 { bytes * 8e-3 / self.gbps() + self.nic.latency_us } else { 0.0 }
    }
}

/// A link model with a name.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Named {
    /// What it is called on the command line.
    pub name: &'static str,
    /// The model.
    pub link: Link,
    /// What it models, and the origin of its numbers.
    pub about: &'static str,
}

/// All named models. docs/simulate.md states what was measured and what was fitted.
pub const NAMED: [Named; 4] = [
    Named { name: "none", link: Link { nics: 1, nic: LinkModel::FREE }, about: "no limit and no latency" },
    Named {
        name: "cx7",
        link: Link { nics: 1, nic: LinkModel { gbps: 400.0, latency_us: 2.0, per_message_us: 0.01 } },
        about: "one ConnectX-7 a GPU: line rate of NDR and 400GbE; latency of a small write between hosts behind a \
                switch or two, GPU memory at both ends; per message: what DeepEP's published latencies leave room for, \
                as they do not grow with the number of messages beyond their bytes",
    },
    Named {
        name: "efa-p5",
        link: Link { nics: 4, nic: LinkModel { gbps: 100.0, latency_us: EFA_P5_LATENCY_US, per_message_us: 0.3 } },
        about: "EC2 p5: four EFAv2 NICs a GPU; latency as efa-p5en, over 0.65, since AWS states up to 35 % less for \
                EFAv3; per message as efa-p5en",
    },
    Named {
        name: "efa-p5en",
        link: Link { nics: 2, nic: LinkModel { gbps: 200.0, latency_us: EFA_P5EN_LATENCY_US, per_message_us: 0.3 } },
        about: "EC2 p5en: two EFAv3 NICs a GPU; latency fitted to pplx-garden's published latencies on EFA, so it holds \
                what the software of EFA costs as well; per message: a lower bound from UCCL-EP's published latencies \
                of one message per token and expert",
    },
];

/// The best fit to the six published latencies of pplx-garden on EFA.
const EFA_P5EN_LATENCY_US: f64 = 35.0;
const EFA_P5_LATENCY_US: f64 = 75.0;

/// Reads a named model or `GBPS:LATENCY_US:PER_MESSAGE_US`, which is one NIC.
///
/// # Errors
/// `Argument` that names the valid forms, or the possible values.
pub fn parse(text: &str) -> Result<Link> {
    if let Some(named) = NAMED.iter().find(|named| named.name == text) {
        return Ok(named.link);
    }
    let refuse = |advice: &str| Error::argument("link", format!("`{text}`"), advice);
    let numbers: Option<Vec<f64>> = text.split(':').map(|number| number.parse().ok()).collect();
    let Some([gbps, latency_us, per_message_us]) = numbers.as_deref() else {
        return Err(refuse("give none, cx7, efa-p5, efa-p5en or GBPS:LATENCY_US:PER_MESSAGE_US, as in 400:5:0.2"));
    };
    let nic = LinkModel { gbps: *gbps, latency_us: *latency_us, per_message_us: *per_message_us };
    // The simulated network's clock cannot distinguish less than a picosecond per byte from no limit.
    if !nic.is_sane() || nic.gbps > MAX_GBPS {
        return Err(refuse("give 0.001 to 8000 Gb/s, and times from 0 to 1000000 us"));
    }
    Ok(Link { nics: 1, nic })
}

const MAX_GBPS: f64 = 8000.0;

#[cfg(test)]
mod tests {
    use super::*;
    use crate::transport::network::imm::MAX_NICS;
    use crate::transport::network::sim::SimConfig;

    #[test]
    fn every_named_model_is_found_usable_and_described() {
        for named in NAMED {
            assert_eq!(parse(named.name), Ok(named.link));
            assert!(usize::from(named.link.nics) <= MAX_NICS && named.about.len() > 10, "{}", named.name);
            let config = SimConfig { nics: named.link.models(), ..SimConfig::calm() };
            assert_eq!(config.check(), Ok(()), "{}", named.name);
        }
        let rates = |name: &str| parse(name).unwrap().gbps();
        assert_eq!((rates("cx7"), rates("efa-p5"), rates("efa-p5en")), (400.0, 400.0, 400.0));
    }

    #[test]
    fn numbers_are_one_nic_and_nonsense_is_refused_with_its_value() {
        let link = parse("100:5:0.2").unwrap();
        assert_eq!((link.nics, link.gbps(), link.nic.latency_us, link.nic.per_message_us), (1, 100.0, 5.0, 0.2));
        for text in
            ["", "cx8", "400", "400:2", "400:2:1:1", "0:1:1", "-1:1:1", "400:-1:0", "NaN:1:1", "inf:1:1", "9e3:1:1"]
        {
            let refused = parse(text).unwrap_err().to_string();
            assert!(refused.contains(&format!("`{text}`")) && refused.contains("give "), "{refused}");
        }
    }

    #[test]
    fn the_floor_is_bytes_over_rate_after_the_latency() {
        let link = parse("400:2:1").unwrap();
        assert_eq!((link.floor_us(50_000.0), link.floor_us(0.0)), (3.0, 0.0));
        assert_eq!(parse("efa-p5en").unwrap().floor_us(50_000.0), 1.0 + EFA_P5EN_LATENCY_US);
        assert_eq!(parse("none").unwrap().floor_us(1e9), 0.0);
    }
}
