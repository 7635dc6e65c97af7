//! Counts of a simulated network's events, so that a test can show that the disturbances it is meant for occurred.

use std::fmt;
use std::ops::AddAssign;

macro_rules! counts {
    ($($(#[$doc:meta])* $name:ident),* $(,)?) => {
        /// Counts of events, disturbances above all, since the network was made.
        #[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
        pub struct Counts { $($(#[$doc])* pub $name: u64),* }

        impl AddAssign for Counts {
            fn add_assign(&mut self, other: Counts) {
                $(self.$name += other.$name;)*
            }
        }

        impl fmt::Display for Counts {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                let mut gap = "";
                $(
                    write!(f, "{gap}{} {}", self.$name, stringify!($name).replace('_', " "))?;
                    gap = ", ";
                )*
                Ok(())
            }
        }
    };
}

counts! {
    /// Writes accepted.
    writes,
    /// Control messages accepted.
    messages,
    /// Packets placed.
    packets,
    /// Immediates and messages delivered after a later one of the same sender and receiver.
    reordered,
    /// Packets placed after a later one of the same write.
    packets_out_of_order,
    /// Packets and completions held back by a long delay.
    delayed,
    /// Posts and sends answered `Full`.
    full,
    /// Those of them that had room.
    full_injected,
    /// Writes read when posted, and completed before the last packet was placed.
    completed_early,
    /// Writes whose acknowledgement was lost, and which completed late.
    completed_late,
    /// Writes that stayed with their endpoint until a flush or poll.
    held,
    /// NICs brought to a stop.
    stops,
    /// Packets that waited for a stopped NIC.
    stalled,
    /// Writes failed by chance or by order.
    failed,
    /// Writes that failed because their receiver had no receive left.
    unready,
    /// Writes that failed or fell silent because their peer was dead, had been reset, or had not connected.
    unreachable,
    /// Writes and messages cut off on the way, by a death or a reset at either end.
    cut,
    /// Writes dropped because their target had been taken back.
    dropped,
    /// Regions taken back from peers that had not let go in time.
    cut_off,
    /// Ranks killed or dropped.
    deaths,
}
