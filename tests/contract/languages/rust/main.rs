//! A program that uses the stubs as a client does; it is compiled and never run.
#![allow(dead_code)]

mod tandem {
    pub mod admin {
        pub mod v1 {
            include!("tandem/admin/v1/tandem.admin.v1.rs");
        }
    }
    pub mod common {
        pub mod v1 {
            include!("tandem/common/v1/tandem.common.v1.rs");
        }
    }
    pub mod executor {
        pub mod v1 {
            include!("tandem/executor/v1/tandem.executor.v1.rs");
        }
    }
    pub mod inference {
        pub mod v1 {
            include!("tandem/inference/v1/tandem.inference.v1.rs");
        }
    }
}

use tandem::common::v1::{ErrorReason, FinishReason};
use tandem::inference::v1::inference_service_client::InferenceServiceClient;
use tandem::inference::v1::{generate_request::Prompt, generate_response::Event, GenerateRequest, SamplingParams};

async fn generate() -> Result<(), Box<dyn std::error::Error>> {
    let mut client = InferenceServiceClient::connect("http://127.0.0.1:50051").await?;
    let mut request = GenerateRequest {
        prompt: Some(Prompt::Text("hello".into())),
        sampling: Some(SamplingParams { seed: Some(7), ..Default::default() }),
        ..Default::default()
    };
    let mut responses = client.generate(request.clone()).await?.into_inner();
    while let Some(response) = responses.message().await? {
        match response.event {
            Some(Event::Started(started)) => {
                request.request_id = Some(started.request_id);
                request.sampling = started.sampling;
                request.stopping = started.stopping;
            }
            Some(Event::Finished(finished)) => println!("{}", finished.reason() == FinishReason::Eos),
            _ => (),
        }
    }
    Ok(())
}

fn main() {
    println!("{:?}", ErrorReason::from_str_name("ERROR_REASON_QUEUE_FULL"));
    let runtime = tokio::runtime::Builder::new_current_thread().build();
    println!("{:?}", runtime.map(|runtime| runtime.block_on(generate()).is_ok()));
}
