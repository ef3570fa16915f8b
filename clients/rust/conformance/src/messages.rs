//! Messages of the contract, from JSON and to JSON.

use prost::Message;
use prost_reflect::{DescriptorPool, DynamicMessage, MessageDescriptor, SerializeOptions};
use serde_json::Value;
use tandem_client::{Error, tonic::Status};

const DESCRIPTORS: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/descriptors.binpb"));

pub struct Messages(DescriptorPool);

impl Default for Messages {
    fn default() -> Self {
        Self(DescriptorPool::decode(DESCRIPTORS).expect("the build made them"))
    }
}

impl Messages {
    /// Return the message that a value describes; null is an empty one.
    pub fn read<M: Message + Default>(&self, name: &str, value: &Value) -> Result<M, Error> {
        if value.is_null() {
            return Ok(M::default());
        }
        let message = DynamicMessage::deserialize(self.descriptor(name), value)
            .map_err(|error| Status::invalid_argument(error.to_string()))?;
        Ok(message.transcode_to().expect("stubs and descriptors have one source"))
    }

    /// Return a message as JSON, with the field names of the contract.
    pub fn write<M: Message>(&self, name: &str, message: &M) -> Value {
        let mut found = DynamicMessage::new(self.descriptor(name));
        found.transcode_from(message).expect("stubs and descriptors have one source");
        let options = SerializeOptions::new().use_proto_field_name(true);
        found.serialize_with_options(serde_json::value::Serializer, &options).expect("it is JSON")
    }

    fn descriptor(&self, name: &str) -> MessageDescriptor {
        let name = format!("tandem.inference.v1.{name}");
        self.0.get_message_by_name(&name).expect("the contract has it")
    }
}
