"""Sentences in scripts that an English vocabulary knows, and in scripts that it does not."""

KNOWN = (
    "We rented a small boat, but the wind was too strong, so we had coffee at Marta's place and talked about the kiln.",
    "Der Wind war zu stark, deshalb haben wir bei Marta Kaffee getrunken und über die Wohnungsbesichtigung gesprochen.",
    "Le vent soufflait trop fort, alors nous avons bu un café chez Marta et parlé du four jusqu'à minuit.",
)
FOREIGN = (
    "토요일에 호수에 가서 작은 배를 빌렸는데 바람이 너무 세서 마르타 집에서 커피를 마셨어요.",
    "土曜日に湖へ行って小さなボートを借りましたが、風が強すぎたのでコーヒーを飲みました。",
    "星期六我们去了湖边，租了一条小船，但是风太大了，所以我们改去玛尔塔家喝咖啡聊天。",
    "ذهبنا يوم السبت إلى البحيرة واستأجرنا قاربا صغيرا لكن الريح كانت قوية جدا.",
    "В субботу мы поехали на озеро и взяли напрокат маленькую лодку, но ветер был сильным.",
    "शनिवार को हम झील पर गए और एक छोटी नाव किराए पर ली लेकिन हवा बहुत तेज थी।",
)
