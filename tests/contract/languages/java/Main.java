import com.google.rpc.ErrorInfo;
import io.grpc.ManagedChannel;
import io.grpc.ManagedChannelBuilder;
import io.grpc.StatusRuntimeException;
import io.grpc.protobuf.StatusProto;
import io.tandem.common.v1.ErrorReason;
import io.tandem.common.v1.FinishReason;
import io.tandem.inference.v1.GenerateRequest;
import io.tandem.inference.v1.GenerateResponse;
import io.tandem.inference.v1.InferenceServiceGrpc;
import io.tandem.inference.v1.SamplingParams;
import java.util.Iterator;

/** A program that uses the stubs as a client does; it is compiled and never run. */
public final class Main {
  /** Returns the reason of a failed call; valueOf throws where this contract does not know it. */
  static ErrorReason reason(StatusRuntimeException error) throws Exception {
    for (com.google.protobuf.Any detail : StatusProto.fromThrowable(error).getDetailsList()) {
      if (detail.is(ErrorInfo.class)) {
        return ErrorReason.valueOf("ERROR_REASON_" + detail.unpack(ErrorInfo.class).getReason());
      }
    }
    return ErrorReason.ERROR_REASON_UNSPECIFIED;
  }

  public static void main(String[] arguments) throws Exception {
    ManagedChannel channel =
        ManagedChannelBuilder.forTarget("127.0.0.1:50051").usePlaintext().build();
    GenerateRequest.Builder request =
        GenerateRequest.newBuilder()
            .setText("hello")
            .setSampling(SamplingParams.newBuilder().setSeed(7));
    try {
      Iterator<GenerateResponse> responses =
          InferenceServiceGrpc.newBlockingStub(channel).generate(request.build());
      while (responses.hasNext()) {
        GenerateResponse response = responses.next();
        switch (response.getEventCase()) {
          case STARTED:
            request.setRequestId(response.getStarted().getRequestId());
            request.setSampling(response.getStarted().getSampling());
            request.setStopping(response.getStarted().getStopping());
            break;
          case FINISHED:
            System.out.println(
                response.getFinished().getReason() == FinishReason.FINISH_REASON_EOS);
            break;
          default:
            break;
        }
      }
    } catch (StatusRuntimeException error) {
      System.out.println(reason(error));
    }
  }
}
