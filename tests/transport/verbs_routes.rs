//! Which ports reach each other over verbs: InfiniBand subnets and partitions, held to the double of libibverbs.

use crate::verbs_regions::alone;
use tokenyard::internals::base::{Error, Rank, Result};
use tokenyard::internals::transport::network::Transport;
use tokenyard::internals::transport::network::verbs::{VerbsConfig, VerbsEndpoint};

/// The endpoint of a rank, which has the device of its number.
fn open(rank: u32, pkey: Option<u16>) -> Result<VerbsEndpoint> {
    let mut config = VerbsConfig::default();
    config.devices = vec![format!("mlx5_{rank}")];
    config.pkey = pkey;
    VerbsEndpoint::open(Rank(rank), config)
}

/// What comes of connecting rank 0 to the rank of another device.
fn connect(to: u32, pkeys: [Option<u16>; 2]) -> Result<()> {
    let (mut own, mut other) = (open(0, pkeys[0]).unwrap(), open(to, pkeys[1]).unwrap());
    let address = other.address(Rank(0)).unwrap();
    own.connect(Rank(to), &address)
}

fn refused(outcome: Result<()>) -> String {
    let why = outcome.unwrap_err();
    assert!(matches!(&why, Error::Transport { .. } | Error::Config { .. }), "{why:?}");
    why.to_string()
}

/// Without a router's LID, packets for another subnet would go to whoever has the peer's LID in this one.
#[test]
fn port_of_another_subnet_taken_for_a_neighbour() {
    let settings = [
        ("DEVICES", "mlx5_0,mlx5_1,mlx5_2"),
        ("LINK", "infiniband"),
        ("PREFIX", "fe80000000000000,fe80000000000000,fec0000000000007"),
    ];
    alone("verbs_routes::port_of_another_subnet_taken_for_a_neighbour", &settings, || {
        assert_eq!(connect(1, [None; 2]), Ok(()));
        let why = refused(connect(2, [None; 2]));
        let named = "is in the InfiniBand subnet fec0:0000:0000:0007, not fe80:0000:0000:0000";
        assert!(why.contains(named) && why.contains("address of rank 2"), "{why}");
    });
}

/// Prefixes of RoCE's addresses are no subnets: routers know their way.
#[test]
fn addresses_of_roce_refused_as_subnets() {
    let settings = [("DEVICES", "mlx5_0,mlx5_1"), ("LINK", "ethernet")];
    alone("verbs_routes::addresses_of_roce_refused_as_subnets", &settings, || {
        assert_eq!(connect(1, [None, Some(0xffff)]), Ok(()));
    });
}

#[test]
fn partition_that_its_port_or_peer_lacks() {
    let settings = [
        ("DEVICES", "mlx5_0,mlx5_1,mlx5_2"),
        ("LINK", "infiniband"),
        ("PKEYS", "ffff+0+1234+9234+0055,ffff+8055,ffff+0055"),
    ];
    alone("verbs_routes::partition_that_its_port_or_peer_lacks", &settings, || {
        for key in [0, 0x8000] {
            let why = refused(open(0, Some(key)).map(drop));
            assert!(why.contains(&format!("pkey is {key:#06x}")), "{why}");
        }
        let why = refused(open(0, Some(0x1235)).map(drop));
        assert!(why.contains("0x1235") && why.contains("has 0xffff, 0x1234, 0x9234, 0x0055"), "{why}");
        // The key at index 0 is that of both unless one is given.
        assert_eq!(connect(1, [None; 2]), Ok(()));
        assert_eq!(connect(1, [None, Some(0x7fff)]), Ok(()));
        let why = refused(connect(1, [Some(0x1234), None]));
        assert!(why.contains("uses partition key 0xffff, not 0x9234"), "{why}");
        // Membership is the port's matter, but two limited members do not reach each other.
        assert_eq!(connect(1, [Some(0x8055), Some(0x0055)]), Ok(()));
        let why = refused(connect(2, [Some(0x8055), Some(0x8055)]));
        assert!(why.contains("is a limited member of partition 0x0055, and so is this rank"), "{why}");
    });
}

/// All queue pairs are of the partition: those of connections, of datagrams, and of flushes. The double's log
/// names their keys.
#[test]
fn queue_pair_of_another_partition() {
    let settings = [("DEVICES", "mlx5_0,mlx5_1"), ("LINK", "infiniband"), ("PKEYS", "ffff+8001+8002")];
    alone("verbs_routes::queue_pair_of_another_partition", &settings, || {
        let mut config = VerbsConfig::default();
        (config.devices, config.pkey, config.flush) = (vec!["mlx5_0".into()], Some(2), Some(true));
        let mut own = VerbsEndpoint::open(Rank(0), config).unwrap();
        let address = open(1, Some(2)).unwrap().address(Rank(0)).unwrap();
        own.connect(Rank(1), &address).unwrap();
        // Datagrams, flushes, writes and messages; and datagrams of rank 1.
        let log = std::env::var_os("TOKENYARD_IBVERBS_LOG").unwrap();
        let events = crate::double::ibverbs_log(log.as_ref());
        let events = events.iter().filter(|event| event["event"] == "partition");
        let keys: Vec<&str> = events.map(|event| event["key"].as_str().unwrap()).collect();
        assert_eq!(keys, ["8002"; 5]);
    });
}
